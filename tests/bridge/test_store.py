"""What holds for every tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.errors import StoreFull
from bridge.store import DiskStore, Entry, MemoryStore, Store


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    limit = 2 << 20
    opened: Store = MemoryStore(limit) if request.param == "memory" else DiskStore(tmp_path, limit)
    yield opened
    opened.close()


def _payload(store: Store, number: int) -> bytes | None:
    with store.reader() as read:
        found = read(number)
        return None if found is None else bytes(found)


def test_entries_are_numbered_in_order_and_read_back(store: Store) -> None:
    payloads = [b"a" * 10, None, b"b" * 100_000]
    numbers = store.append([Entry(b"header", payload) for payload in payloads])
    assert numbers == [0, 1, 2]
    assert store.append([Entry(b"header", b"c")]) == [3]
    assert [_payload(store, number) for number in range(5)] == [*payloads, b"c", None]


def test_a_batch_that_does_not_fit_leaves_everything_as_it_was(store: Store) -> None:
    store.append([Entry(b"header", b"a" * 1000)])
    used = store.used_bytes()
    with pytest.raises(StoreFull, match=r"--(memory|disk)-limit"):
        store.append([Entry(b"header", b"b"), Entry(b"header", bytes(3 << 20))])
    assert store.used_bytes() == used
    assert [_payload(store, number) for number in (0, 1)] == [b"a" * 1000, None]


def test_a_full_store_is_read_as_before_and_never_passes_its_limit(store: Store) -> None:
    held = _fill(store)
    assert held > 50
    assert store.used_bytes() <= store.limit_bytes()
    assert all(
        _payload(store, number) == number.to_bytes(4, "big") * 5000 for number in range(held)
    )
    assert store.append([Entry(b"", b"")]) == [held]


def _fill(store: Store) -> int:
    """Append until the store refuses; return how many entries it took."""
    for held in range(10_000):
        try:
            store.append([Entry(b"header", held.to_bytes(4, "big") * 5000)])
        except StoreFull:
            return held
    pytest.fail("the store took everything")


def test_a_small_payload_does_not_keep_the_buffer_that_it_came_in() -> None:
    store = MemoryStore(1 << 20)
    buffer = bytearray(b"abcdef")
    store.append([Entry(b"", memoryview(buffer)[2:4])])
    buffer[2:4] = b"XX"
    assert _payload(store, 0) == b"cd"
