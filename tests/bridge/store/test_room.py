"""A full store can be emptied, space comes back, and a disk that fails ends nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.client.client import TraceClient
from bridge.errors import StoreFailing, StoreFull
from bridge.observe.status import Status, from_json
from bridge.store import CorruptStore, DiskStore, Entry, Store
from bridge.store.disk.room import Room
from bridge.wire import Observe, ObserveReply, Policy

LIMIT = 1 << 20
_READER = """
import sys
from pathlib import Path
from bridge.store import DiskStore
store = DiskStore(Path(sys.argv[1]), 0, readonly=True)
with store.reader() as read:
    payload = read(0).payload
    print("reads", flush=True)
    sys.stdin.readline()
    print(len(payload), bytes(payload) == b"x" * 5000)
print(len(list(store.replay())))
"""


@given(st.integers(0, 1 << 50))
def test_the_parts_of_a_limit_leave_room_to_each_next_one(limit: int) -> None:
    room = Room.of(limit)
    assert 0 < room.rows < room.reserved < room.steps < room.file
    assert room.file + room.reserve_file + 2 * room.checkpoint <= room.limit
    assert room.rows + room.limit // 32 <= room.row_file < room.file


@pytest.mark.parametrize("nbytes", [600, 1500, 3000, 20_000, 100_000])
def test_a_store_full_of_whatever_sizes_takes_a_step_and_lets_go(
    tmp_path: Path, nbytes: int
) -> None:
    store = DiskStore(tmp_path, LIMIT, sync=False)
    held = _append_until_full(store, Entry(b"rows" * 100, bytes(nbytes), nbytes))
    reserved = _append_until_full(store, Entry(b"dropped" * 70, reserved=True))
    for again in range(2):
        step = Entry(b"step" * 20, reserved=True, frees_space=True)
        assert store.append([step]) == [held + reserved + again]
        store.close()
        store = DiskStore(tmp_path, LIMIT)
    store.delete(range(held))
    assert store.usage().disk_bytes < LIMIT // 4
    assert _files(tmp_path) <= LIMIT
    assert _append_until_full(store, Entry(b"rows" * 100, bytes(nbytes), nbytes)) > held // 2
    store.close()


def test_a_reader_that_was_killed_keeps_no_space(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    store.append([Entry(b"first", b"x" * 5000)])
    with _other_process(tmp_path) as reader:
        reader.kill()
    for oldest in range(5 * LIMIT // 100_000):
        store.append([Entry(b"rows", bytes(100_000), 1000)])
        store.delete([oldest])
    store.close()


def test_a_reader_that_lives_sees_its_state_while_the_store_goes_on_and_grows(
    tmp_path: Path,
) -> None:
    store = DiskStore(tmp_path, 64 << 20)
    store.append([Entry(b"first", b"x" * 5000)])
    with _other_process(tmp_path) as reader:
        store.delete([0])
        for _ in range(100):
            store.delete(store.append([Entry(b"rows", bytes(10_000), 1000)]))
        for _ in range(8):
            store.append([Entry(b"rows", bytes(1 << 20), 1000)])
        told, _ = reader.communicate("go on\n", timeout=60)
        assert told.splitlines() == ["5000 True", "8"]
    store.close()


class _Failing:
    """An LMDB environment that an error has closed: LMDB refuses everything from then on."""

    def __init__(self, environment: lmdb.Environment) -> None:
        self._environment = environment

    def begin(self, **_: object) -> None:
        raise lmdb.PanicError("the write of a meta page failed")

    def close(self) -> None:
        self._environment.close()

    def reader_check(self) -> None:
        raise lmdb.PanicError("the write of a meta page failed")


def test_what_a_failed_write_closed_is_opened_again_and_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    store.append([Entry(b"one", b"1")])
    for number in (1, 2):
        store._env._env = _Failing(store._env._env)  # type: ignore[assignment]
        assert store.append([Entry(b"more", b"2")]) == [number]
    with store.reader() as read:
        assert [bytes(held.payload) for n in range(3) if (held := read(n))] == [b"1", b"2", b"2"]
    store.close()


def test_a_commit_that_was_refused_and_is_there_all_the_same_is_undone(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    store.append([Entry(b"one", b"1")])
    with store._env.writing() as txn:  # a write whose answer was an error after it was done
        store._put(txn, 1, Entry(b"refused", b"refused"))
        store._put(txn, 2, Entry(b"refused", b"refused"))
    store._rewinds = True
    assert store.append([Entry(b"two")]) == [1]
    assert list(store.replay()) == [(0, b"one"), (1, b"two")]
    with store.reader() as read:
        assert read(1) is None
        assert read(2) is None
    store.close()


def test_what_could_not_be_deleted_is_deleted_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, LIMIT)
    store.append([Entry(b"one"), Entry(b"two"), Entry(b"three")])

    def fails(_: object) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_try", fails)
        with pytest.raises(
            StoreFailing, match=r"writing to the store .* failed .*; check the disk"
        ):
            store.delete([0])
        with pytest.raises(StoreFailing):
            store.append([Entry(b"four")])
    assert len(list(store.replay())) == 3
    store.delete([1])
    assert list(store.replay()) == [(2, b"three")]
    store.close()


def test_pages_that_were_never_written_are_no_loss_and_others_are(tmp_path: Path) -> None:
    """LMDB does not write pages that it took and gave up in one transaction."""
    store = DiskStore(tmp_path, 64 << 20)
    store.append([Entry(b"kept", b"x" * 100_000)])
    while _length(tmp_path) >= _used(store):
        with store._env.writing() as txn:
            first = store._next
            for number in range(first, first + 40):
                store._put(txn, number, Entry(b"h" * 500, b"y" * 3000))
            for number in range(first, first + 40):
                for name in (b"journal", b"payload", b"sums"):
                    txn.delete(number.to_bytes(8, "big"), db=store._env.table(name))
    used = _used(store)
    store.close()
    for readonly in (True, False):
        store = DiskStore(tmp_path, 64 << 20, readonly=readonly)
        with store.reader() as read:
            held = read(0)
            assert held is not None
            assert bytes(held.payload) == b"x" * 100_000
        store.close()
    (tmp_path / "data.mdb").open("r+b").truncate(50_000)
    for readonly in (True, False):
        with pytest.raises(CorruptStore, match=rf"cut off at 50000 of {used} bytes"):
            DiskStore(tmp_path, 64 << 20, readonly=readonly)


def test_a_store_that_fails_says_so_and_since_when(
    tmp_path: Path, serve: Callable[[Store], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, LIMIT)
    with TraceClient(serve(store)) as client:
        client.begin_step(1)
        real = store._try

        def fails(_: object) -> None:
            raise lmdb.Error("mdb_txn_commit: Input/output error")

        store._try = fails  # type: ignore[method-assign]
        with pytest.raises(StoreFailing):
            client.begin_step(2)
        assert (client.stats().failing, client.stats().full) == (1, 0)
        status = _observed(client)
        assert status.store.state == "failing"
        assert "Input/output error" in status.store.reason
        client.gc(Policy(keep=1))
        store._try = real  # type: ignore[method-assign]
        client.begin_step(2)
        assert client.stats().failing == 0
        assert _observed(client).store.state == "ok"


@contextmanager
def _other_process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that reads one state of the store and is told when to go on."""
    command = [sys.executable, "-c", _READER, str(directory)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        yield reader


def _observed(client: TraceClient) -> Status:
    (reply,) = client._ask(Observe(), ObserveReply)
    return from_json(reply.document)


def _append_until_full(store: DiskStore, entry: Entry) -> int:
    for held in range(20_000):
        try:
            store.append([entry])
        except StoreFull:
            return held
    pytest.fail("the store took everything")


def _files(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir() if file.name != "lock.mdb")


def _length(directory: Path) -> int:
    return (directory / "data.mdb").stat().st_size


def _used(store: DiskStore) -> int:
    environment = store._env._env
    return int((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])
