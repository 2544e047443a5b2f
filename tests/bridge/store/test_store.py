"""What holds for every tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.errors import StoreFull
from bridge.store import CachedStore, DiskStore, Entry, MemoryStore, Store
from bridge.store.disk.scratch import scratch_store

LIMIT = 4 << 20
KINDS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: MemoryStore(LIMIT),
    "disk": lambda path: DiskStore(path, LIMIT),
    "memory and disk": lambda path: CachedStore(DiskStore(path, LIMIT), LIMIT // 4),
    "memory and spill": lambda path: MemoryStore(LIMIT // 4, scratch_store(path, LIMIT)),
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = KINDS[request.param](tmp_path)
    assert opened.tier == request.param
    yield opened
    opened.close()


def _payload(store: Store, number: int) -> bytes | None:
    with store.reader() as read:
        found = read(number)
        return None if found is None else bytes(found.payload)


def _used(store: Store) -> int:
    usage = store.usage()
    return usage.memory_bytes + usage.disk_bytes


def _pattern(number: int, nbytes: int = 20_000) -> bytes:
    return number.to_bytes(4, "big") * (nbytes // 4)


def test_entries_are_numbered_in_order_and_read_back(store: Store) -> None:
    payloads = [b"a" * 10, None, b"b" * 100_000]
    numbers = store.append([Entry(b"header", payload) for payload in payloads])
    assert numbers == [0, 1, 2]
    assert store.append([Entry(b"header", b"c")]) == [3]
    assert [_payload(store, number) for number in range(5)] == [*payloads, b"c", None]


def test_a_batch_that_does_not_fit_leaves_everything_as_it_was(store: Store) -> None:
    store.append([Entry(b"header", b"a" * 1000)])
    used = _used(store)
    with pytest.raises(StoreFull, match=r"--(memory|disk)-limit"):
        store.append([Entry(b"header", b"b"), Entry(b"header", bytes(5 << 20), 1000)])
    assert _used(store) == used
    assert [_payload(store, number) for number in (0, 1)] == [b"a" * 1000, None]


def test_a_full_store_is_read_as_before_and_never_passes_its_limits(store: Store) -> None:
    held = _fill(store)
    assert held > 50
    usage = store.usage()
    assert usage.memory_bytes <= usage.memory_limit
    assert usage.disk_bytes <= usage.disk_limit
    assert all(_payload(store, number) == _pattern(number) for number in range(held))
    assert store.append([Entry(b"", b"")]) == [held]


def test_space_of_dropped_entries_is_used_again_for_ever(store: Store) -> None:
    held = _fill(store)
    oldest = 0
    for number in range(held, 5 * held):
        store.delete([oldest])
        oldest += 1
        assert store.append([Entry(b"header", _pattern(number), 4000)]) == [number]
    assert _payload(store, oldest - 1) is None
    assert all(_payload(store, number) == _pattern(number) for number in range(oldest, 5 * held))
    store.delete(range(5 * held))
    assert _used(store) < 100


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=60),
    dropped=st.randoms(use_true_random=False),
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_mix_of_sizes_and_drops_reads_back_exactly_what_is_held(
    kind: str, tmp_path_factory: pytest.TempPathFactory, sizes: list[int], dropped: object
) -> None:
    store = KINDS[kind](tmp_path_factory.mktemp("store"))
    held: dict[int, bytes] = {}
    for size in sizes:
        payload = bytes([size % 251]) * size
        try:
            (number,) = store.append([Entry(b"h", payload, max(1, size // 7))])
        except StoreFull:
            assert held, "an empty store has room"
            for number in dropped.sample(list(held), max(1, len(held) // 2)):  # type: ignore[attr-defined]
                store.delete([number])
                del held[number]
        else:
            held[number] = payload
    assert {number: _payload(store, number) for number in held} == held
    store.close()


def test_the_index_counts_against_the_memory_limit(store: Store) -> None:
    if not store.usage().memory_limit:
        pytest.skip("this tier has no memory")
    store.append([Entry(b"header", _pattern(0))])
    store.reserve(store.usage().memory_limit + 1)
    with pytest.raises(StoreFull, match="index"):
        store.append([Entry(b"header", _pattern(1))])
    store.reserve(0)
    assert store.append([Entry(b"header", _pattern(1))]) == [1]
    assert _payload(store, 0) == _pattern(0)


def _fill(store: Store) -> int:
    """Append until the store refuses; return how many entries it took."""
    for held in range(10_000):
        try:
            store.append([Entry(b"header", _pattern(held), 4000)])
        except StoreFull:
            return held
    pytest.fail("the store took everything")


def test_a_small_payload_does_not_keep_the_buffer_that_it_came_in() -> None:
    store = MemoryStore(1 << 20)
    buffer = bytearray(b"abcdef")
    store.append([Entry(b"", memoryview(buffer)[2:4])])
    buffer[2:4] = b"XX"
    assert _payload(store, 0) == b"cd"


def test_scratch_space_has_no_name_that_could_outlive_the_process(tmp_path: Path) -> None:
    store = scratch_store(tmp_path, LIMIT)
    store.append([Entry(b"header", _pattern(0))])
    assert list(tmp_path.iterdir()) == []
    assert _payload(store, 0) == _pattern(0)
    store.close()
