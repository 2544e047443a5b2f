"""What the Mooncake tier promises, shown on a real pool of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.cli.mooncake_pool import POOL_READY
from bridge.client.client import TraceClient
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import StoreFull, TraceError
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.store import CorruptStore, DiskStore, Entry, MooncakeStore, ReadPlan, Store
from bridge.store.mooncake.pool import NoMooncake, Pool, PoolUnreachable
from bridge.store.pool_directory import next_opening, refuse_pooled
from bridge.transport.ports import held_port

pytest.importorskip(
    "mooncake.store",
    reason="needs mooncake-transfer-engine-non-cuda, libibverbs1 and libnuma1",
    exc_type=ImportError,
)

JOURNAL = 16 << 20
POOL_MIB = 16
Start = Callable[..., EmbeddedBridge]


@dataclass(frozen=True)
class RunningPool:
    """A pool in processes of its own, started as users start it."""

    master: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _start_pool(port: int = 0) -> RunningPool:
    port = port or held_port()
    command = [sys.executable, "-m", "bridge", "mooncake", "--size", f"{POOL_MIB}MiB"]
    command += ["--port", str(port), "--parent", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline().decode()
    assert line.startswith(POOL_READY), line
    return RunningPool(line.removeprefix(POOL_READY).strip(), process)


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[RunningPool]:
    pool = _start_pool()
    yield pool
    pool.kill()


@pytest.fixture
def mortal_pool() -> Iterator[RunningPool]:
    pool = _start_pool()
    yield pool
    pool.kill()


@pytest.fixture
def open_store(shared_pool: RunningPool, tmp_path: Path) -> Iterator[Callable[[], MooncakeStore]]:
    """Open the store of a directory, closing what the test had open; at the end empty it."""
    opened: list[MooncakeStore] = []

    def reopen() -> MooncakeStore:
        if opened:
            opened.pop().close()
        opened.append(MooncakeStore(tmp_path / "store", JOURNAL, shared_pool.master))
        return opened[0]

    yield reopen
    store = opened[0]
    store.delete([number for number, _ in store.replay()])
    assert store.usage().pool_bytes == 0
    store.close()


@pytest.fixture
def store(open_store: Callable[[], MooncakeStore]) -> MooncakeStore:
    return open_store()


def test_entries_are_there_after_reopening_and_numbering_goes_on(
    open_store: Callable[[], MooncakeStore],
) -> None:
    payloads = [b"a" * 10, None, b"b" * 100_000, None]
    assert open_store().append([Entry(b"header", payload) for payload in payloads]) == [0, 1, 2, 3]
    store = open_store()
    assert list(store.replay()) == [(number, b"header") for number in range(4)]
    assert [_payload(store, number) for number in range(5)] == [*payloads, None]
    assert store.append([Entry(b"header", b"c")]) == [4]


def test_a_full_pool_refuses_in_one_sentence_and_loses_nothing(store: MooncakeStore) -> None:
    held = 0
    with pytest.raises(StoreFull, match=r"pool at .* has no room for .*bridge gc"):  # noqa: PT012
        while held < 1000:
            store.append([Entry(b"header", _pattern(held))])
            held += 1
    assert held * len(_pattern(0)) > POOL_MIB << 19
    assert [number for number, _ in store.replay()] == list(range(held))
    assert all(_payload(store, number) == _pattern(number) for number in range(held))


def test_space_of_dropped_entries_is_used_again_for_ever(store: MooncakeStore) -> None:
    held = POOL_MIB - 2
    for number in range(5 * held):
        if number >= held:
            store.delete([number - held])
            assert _payload(store, number - held) is None
        assert store.append([Entry(b"header", _pattern(number, 1 << 20))]) == [number]
    last = range(4 * held, 5 * held)
    assert all(_payload(store, number) == _pattern(number, 1 << 20) for number in last)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    row_bytes=st.integers(1, 1000),
    random=st.randoms(use_true_random=False),
)
def test_any_rows_wanted_of_any_entries_are_those_that_were_appended(
    store: MooncakeStore, rows: list[int], row_bytes: int, random: Random
) -> None:
    # Everything is drawn before the store is touched: hypothesis may end an example while drawing.
    gone = random.sample(range(len(rows)), len(rows) // 3)
    picks = []
    for entry in random.choices(range(len(rows)), k=40):
        count = random.randint(1, rows[entry])
        picks.append((entry, random.randint(0, rows[entry] - count), count))
    payloads = [np.random.default_rng(count).bytes(count * row_bytes) for count in rows]
    numbers = store.append([Entry(b"h", payload, row_bytes) for payload in payloads])
    dropped = [numbers[entry] for entry in gone]
    store.delete(dropped)
    runs = [(numbers[entry], first, 0, count) for entry, first, count in picks]
    with store.reader(ReadPlan(row_bytes, runs)) as read:
        for number, first, _, count in runs:
            held = read(number)
            assert (held is None) == (number in dropped)
            if held is not None:
                begin = (first - held.first_row) * row_bytes
                sent = payloads[number - numbers[0]]
                expected = sent[first * row_bytes : (first + count) * row_bytes]
                assert held.payload[begin : begin + count * row_bytes] == expected
    store.delete(numbers)
    assert store.usage().pool_bytes == 0


def test_only_wanted_rows_are_moved(store: MooncakeStore) -> None:
    store.append([Entry(b"h", bytes(100_000), 1000)])
    with store.reader(ReadPlan(1000, [(0, 70, 0, 2)])) as read:
        held = read(0)
    assert held is not None
    assert (held.first_row, held.payload.nbytes) == (70, 2000)
    assert held.checksums is not None
    assert len(held.checksums) == 2


def test_an_acknowledged_row_survives_kill_9_of_the_daemon(
    shared_pool: RunningPool,
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    start_process: Start,
) -> None:
    payload = make_rows(Part.FORWARD, range(500))
    for turn in range(5):
        bridge = start_process(tmp_path, mooncake=shared_pool.master, memory_limit="1MiB")
        with RecordProducer(bridge.endpoint) as producer:
            producer.register(f"e{turn}", layout)
            rows = range(turn * 100, turn * 100 + 100)
            producer.send_rows(Part.FORWARD, rows, payload[rows.start : rows.stop], "v")
            producer.send_trajectory(f"t{turn}", 0, range(100), rows, "finished")
            producer.flush()
            bridge.process.kill()
            bridge.process.wait()
    bridge = start_process(tmp_path, mooncake=shared_pool.master, keep=1)
    with TraceClient(bridge.endpoint) as client:
        records = [client.fetch(f"t{turn}") for turn in range(5)]
        stats = client.stats()
        assert (stats.store, stats.pool_bytes) == ("memory and Mooncake", payload.nbytes)
        client.begin_step(1)
        client.begin_step(2)
        _wait_until(lambda: client.stats().pool_bytes == 0)
    assert all(record.forward_valid.numpy().all() for record in records)
    np.testing.assert_array_equal(np.concatenate([r.forward for r in records]), payload)


def test_rows_on_their_way_at_kill_9_are_sent_again_and_nothing_stays_behind(
    shared_pool: RunningPool,
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    start_process: Start,
) -> None:
    endpoint = f"tcp://127.0.0.1:{held_port()}"
    options = {"mooncake": shared_pool.master, "memory_limit": "1MiB", "endpoint": endpoint}
    bridge = start_process(tmp_path, **options)
    payload = make_rows(Part.FORWARD, range(400))
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        for row in range(400):
            producer.send_rows(Part.FORWARD, [row], payload[row : row + 1], "v")
            if row % 100 == 50:
                bridge.process.kill()
                bridge.process.wait()
                bridge = start_process(tmp_path, **options)
        producer.send_trajectory("t", 0, range(400), range(400), "finished")
        producer.flush()
    with TraceClient(endpoint) as client:
        records = client.fetch("t")
        held = client.stats().pool_bytes
    assert records.forward_valid.numpy().all()
    np.testing.assert_array_equal(records.forward, payload)
    assert held >= payload.nbytes
    bridge.stop()
    store = MooncakeStore(tmp_path, JOURNAL, shared_pool.master)
    store.delete([number for number, _ in store.replay()])
    # Mooncake gives up what was half written after a while.
    _wait_until(lambda: store.delete([]) is None and store.usage().pool_bytes == 0, most_s=90)
    store.close()


def test_an_entry_that_a_crash_left_without_payload_is_not_replayed(
    open_store: Callable[[], MooncakeStore], shared_pool: RunningPool, tmp_path: Path
) -> None:
    open_store().append([Entry(b"one", b"1"), Entry(b"two", b"2"), Entry(b"three")])
    _elsewhere(shared_pool).remove([_key(tmp_path, 1)])
    store = open_store()
    assert list(store.replay()) == [(0, b"one"), (2, b"three")]
    assert store.append([Entry(b"four", b"4")]) == [3]


def test_a_payload_that_a_crash_left_without_entry_is_removed(
    open_store: Callable[[], MooncakeStore], shared_pool: RunningPool, tmp_path: Path
) -> None:
    open_store().append([Entry(b"one", b"1")])
    pool = _elsewhere(shared_pool)
    orphans = [_key(tmp_path, number) for number in (1, 2)]
    pool.put(dict.fromkeys(orphans, b"orphan"))
    store = open_store()
    assert pool.present(orphans) == [False, False]
    assert store.append([Entry(b"two", b"2")]) == [1]
    assert _payload(store, 1) == b"2"


def test_a_write_of_a_killed_process_that_arrives_late_costs_no_later_payload(
    open_store: Callable[[], MooncakeStore], shared_pool: RunningPool, tmp_path: Path
) -> None:
    open_store()
    store = open_store()
    pool = _elsewhere(shared_pool)
    pool.put({_key(tmp_path, 0): b"late"})
    assert store.append([Entry(b"one", b"1")]) == [0]
    assert _payload(store, 0) == b"1"
    assert _payload(open_store(), 0) == b"1"
    pool.remove([_key(tmp_path, 0)])


def test_openings_of_a_directory_are_told_apart(tmp_path: Path) -> None:
    first, second = (next_opening(tmp_path, empty=True) for _ in range(2))
    assert (first[0], first[1] + 1) == second


def test_rows_that_the_pool_alters_or_loses_are_missing_and_their_neighbours_are_not(
    shared_pool: RunningPool,
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    serve: Callable[[Store], str],
) -> None:
    payload = make_rows(Part.FORWARD, range(200))
    store = MooncakeStore(tmp_path / "store", JOURNAL, shared_pool.master)
    endpoint = serve(store)
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        for begin in (0, 100):
            rows = range(begin, begin + 100)
            producer.send_rows(Part.FORWARD, rows, payload[begin : begin + 100], "v")
        producer.send_trajectory("t", 0, range(200), range(200), "finished")
        producer.flush()
        altered = payload[:100].copy()
        altered[70, 5] ^= 1
        numbers = [number for number, _ in store.replay()]
        first, second = (_key(tmp_path, number) for number in numbers[1:3])
        pool = _elsewhere(shared_pool)
        pool.remove([first, second])
        pool.put({first: altered.data.cast("B")})
    with TraceClient(endpoint) as client:
        records = client.fetch("t", sites=["fc1", "routes"])
        assert np.flatnonzero(~records.forward_valid.numpy()).tolist() == [70, *range(100, 200)]
        assert client.stats().corrupt_rows == 1
    pool.remove([first])


def test_without_its_pool_a_bridge_refuses_and_serves_again_when_it_is_back(
    mortal_pool: RunningPool,
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    serve: Callable[[Store], str],
) -> None:
    payload = make_rows(Part.FORWARD, range(4))
    store = MooncakeStore(tmp_path, JOURNAL, mortal_pool.master)
    endpoint = serve(store)
    with RecordProducer(endpoint) as producer, TraceClient(endpoint, timeout_s=60) as client:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(2), payload[:2], "v")
        producer.send_trajectory("t", 0, range(4), range(4), "finished")
        producer.flush()
        mortal_pool.kill()
        with pytest.raises(TraceError, match=r"Mooncake pool at .* does not answer"):
            client.fetch("t")
        client.begin_step(1)  # goes to the journal only
        producer.send_rows(Part.FORWARD, [2, 3], payload[2:], "v")
        with pytest.raises(StoreFull, match=r"Mooncake pool at .* does not answer"):
            producer.flush(timeout_s=8)
        pool = _start_pool(int(mortal_pool.master.rpartition(":")[2]))
        try:
            producer.flush(timeout_s=60)
            records = client.fetch("t")
            assert records.forward_valid.tolist() == [False, False, True, True]
            np.testing.assert_array_equal(records.forward[2:], payload[2:])
        finally:
            pool.kill()


def test_a_directory_is_served_as_it_was_begun(shared_pool: RunningPool, tmp_path: Path) -> None:
    MooncakeStore(tmp_path / "pooled", JOURNAL, shared_pool.master).close()
    with pytest.raises(CorruptStore, match="serve it with --mooncake"):
        refuse_pooled(tmp_path / "pooled")
    disk = DiskStore(tmp_path / "plain", JOURNAL)
    disk.append([Entry(b"header", b"payload")])
    disk.close()
    refuse_pooled(tmp_path / "plain")
    with pytest.raises(CorruptStore, match="serve it without --mooncake"):
        MooncakeStore(tmp_path / "plain", JOURNAL, shared_pool.master)


def test_two_bridges_share_a_pool_without_meeting(
    open_store: Callable[[], MooncakeStore], shared_pool: RunningPool, tmp_path: Path
) -> None:
    open_store().append([Entry(b"mine", b"1" * 1000)])
    other = MooncakeStore(tmp_path / "other", JOURNAL, shared_pool.master)
    other.append([Entry(b"other", b"2" * 1000)])
    assert _payload(other, 0) == b"2" * 1000
    other.delete([0])
    other.close()
    assert _payload(open_store(), 0) == b"1" * 1000


@pytest.mark.parametrize("master", ["nonsense", "127.0.0.1:1", "127.0.0.1:http"])
def test_a_master_that_is_not_there_is_named(tmp_path: Path, master: str) -> None:
    with pytest.raises(PoolUnreachable, match=rf"{master}.*(127\.0\.0\.1:50051|--mooncake)"):
        MooncakeStore(tmp_path, JOURNAL, master)
    command = [sys.executable, "-m", "bridge", "serve", "--endpoint", "tcp://127.0.0.1:0"]
    done = subprocess.run([*command, "--mooncake", master], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"--mooncake needs --dir" in done.stderr


def test_a_client_that_is_not_installed_is_named(
    shared_pool: RunningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(NoMooncake, match=r"pip install 'sglang-trace\[mooncake\]'"):
        Pool(shared_pool.master)


def test_a_pool_leaves_no_process_behind_however_it_ends(mortal_pool: RunningPool) -> None:
    children = _children(mortal_pool.process.pid)
    assert len(children) == 2
    mortal_pool.kill()
    _wait_until(lambda: not any(_is_alive(child) for child in children))


def test_an_occupied_port_is_named(shared_pool: RunningPool) -> None:
    port = shared_pool.master.rpartition(":")[2]
    command = [sys.executable, "-m", "bridge", "mooncake", "--size", "16MiB", "--port", port]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"choose another --port" in done.stderr


def _payload(store: Store, number: int) -> bytes | None:
    with store.reader() as read:
        found = read(number)
        return None if found is None else bytes(found.payload)


def _pattern(number: int, nbytes: int = 200_000) -> bytes:
    return number.to_bytes(4, "big") * (nbytes // 4)


def _elsewhere(pool: RunningPool) -> Pool:
    return Pool(pool.master)


def _key(tmp_path: Path, number: int, opening: int = 0) -> str:
    name = (tmp_path / "store" / "pool").read_text().split()[0]
    return f"bridge/{name}/{opening}/{number}"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def _wait_until(holds: Callable[[], bool], most_s: float = 30.0) -> None:
    end = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
