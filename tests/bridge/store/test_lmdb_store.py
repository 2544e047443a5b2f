"""What the disk tier promises beyond the others: it survives, and it notices."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.errors import SchemaMismatch, StoreFull
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.store import CorruptStore, DiskStore, Entry, Store, StoreBusy, StoredPayload

LIMIT = 16 << 20


def test_entries_are_there_after_reopening_and_numbering_goes_on(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    store.append([Entry(b"one", b"1"), Entry(b"two")])
    store.close()
    store = DiskStore(tmp_path, LIMIT)
    assert list(store.replay()) == [(0, b"one"), (1, b"two")]
    assert store.append([Entry(b"three")]) == [2]
    store.close()


def test_a_directory_has_one_daemon_at_a_time(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    with pytest.raises(StoreBusy, match="another bridge daemon"):
        DiskStore(tmp_path, LIMIT)
    store.close()
    DiskStore(tmp_path, LIMIT).close()


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    DiskStore(tmp_path, LIMIT).close()
    environment = lmdb.open(str(tmp_path), max_dbs=3)
    with environment.begin(environment.open_db(b"about"), write=True) as txn:
        txn.put(b"schema", b"999")
    environment.close()
    for readonly in (False, True):
        with pytest.raises(SchemaMismatch, match=r"schema 999.*choose another --dir"):
            DiskStore(tmp_path, LIMIT, readonly=readonly)


@pytest.mark.parametrize("damage", ["garbage", "cut"])
def test_a_file_that_is_no_store_is_refused(tmp_path: Path, damage: str) -> None:
    store = DiskStore(tmp_path, LIMIT)
    store.append([Entry(b"one", bytes(100_000))])
    store.close()
    file = tmp_path / "data.mdb"
    if damage == "garbage":
        file.write_bytes(os.urandom(file.stat().st_size))
    else:
        os.truncate(file, 50_000)
    with pytest.raises(CorruptStore, match="restore it from a copy"):
        DiskStore(tmp_path, LIMIT)


def test_a_directory_that_is_not_there_or_not_usable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptStore):
        DiskStore(tmp_path / "absent", LIMIT, readonly=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CorruptStore, match="choose another --dir"):
        DiskStore(tmp_path / "file", LIMIT)


def test_a_full_disk_refuses_in_one_sentence_and_loses_nothing(small_disk: Path) -> None:
    store = DiskStore(small_disk / "store", 1 << 30)
    entries = [Entry(b"header", number.to_bytes(4, "big") * 20_000) for number in range(100)]
    held = 0
    with pytest.raises(StoreFull, match=r"the disk of .* is full; free space"):  # noqa: PT012
        for entry in entries:
            held += len(store.append([entry]))
    store.close()
    store = DiskStore(small_disk / "store", 1 << 30)
    assert len(list(store.replay())) == held > 10
    with store.reader() as read:
        assert all(
            _payload(read(number)) == number.to_bytes(4, "big") * 20_000 for number in range(held)
        )
    store.delete(range(held))
    assert list(store.replay()) == []
    store.append(entries[: held // 2])
    store.close()


def test_replays_that_nobody_reads_to_the_end_take_no_place_of_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.store.disk.lmdb_store._REPLAYED_BYTES", 1)  # a transaction an entry
    store = DiskStore(tmp_path, LIMIT)
    store.append([Entry(name) for name in (b"one", b"two", b"three")])
    half_read = [store.replay() for _ in range(500)]
    assert {next(replay) for replay in half_read} == {(0, b"one")}
    store.delete([1])
    assert list(half_read[0]) == list(half_read[1]) == [(2, b"three")]
    assert list(store.replay()) == [(0, b"one"), (2, b"three")]
    store.close()


def test_a_row_that_stands_in_the_place_of_another_is_missing(
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    serve: Callable[[Store], str],
) -> None:
    payload = make_rows(Part.FORWARD, range(200))
    endpoint = serve(DiskStore(tmp_path, LIMIT))
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(200), payload, "v")
        producer.send_trajectory("t", 0, range(200), range(200), "finished")
    file = tmp_path / "data.mdb"
    held = file.read_bytes()
    places = [held.find(payload[row].tobytes()) for row in (3, 8)]
    with file.open("r+b") as stream:
        for row, place in zip((8, 3), places, strict=True):
            stream.seek(place)
            stream.write(payload[row].tobytes())
    with TraceClient(endpoint) as client:
        records = client.fetch("t")
        assert np.flatnonzero(~records.forward_valid.numpy()).tolist() == [3, 8]
        assert client.stats().corrupt_rows == 2


def test_an_altered_row_is_missing_and_its_neighbours_are_not(
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    serve: Callable[[Store], str],
) -> None:
    payload = make_rows(Part.FORWARD, range(200))
    store = DiskStore(tmp_path, LIMIT)
    endpoint = serve(store)
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(200), payload, "v")
        producer.send_trajectory("t", 0, range(200), range(200), "finished")
    _alter(tmp_path / "data.mdb", payload[70].tobytes())
    with TraceClient(endpoint) as client:
        records = client.fetch("t", sites=["fc1", "routes"])
        assert np.flatnonzero(~records.forward_valid.numpy()).tolist() == [70]
        np.testing.assert_array_equal(records.forward[:70], payload[:70])
        np.testing.assert_array_equal(records.forward[71:], payload[71:])
        assert not records.forward[70].any()
        assert client.stats().corrupt_rows == 1


def test_an_altered_journal_entry_costs_its_rows_only(
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    serve: Callable[[Store], str],
) -> None:
    endpoint = serve(DiskStore(tmp_path / "one", LIMIT))
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        for row in range(3):
            producer.send_rows(Part.FORWARD, [row], make_rows(Part.FORWARD, [row]), f"version{row}")
        producer.send_trajectory("t", 0, range(3), range(3), "finished")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "data.mdb").write_bytes((tmp_path / "one" / "data.mdb").read_bytes())
    _alter(tmp_path / "two" / "data.mdb", b"version1")
    with TraceClient(serve(DiskStore(tmp_path / "two", LIMIT))) as client:
        assert client.fetch("t").forward_valid.tolist() == [True, False, True]
        assert client.stats().damaged_entries == 1


def _alter(file: Path, content: bytes) -> None:
    """Flip one bit in the middle of every copy of ``content`` in a file."""
    held = bytearray(file.read_bytes())
    place = held.find(content)
    assert place >= 0
    with file.open("r+b") as stream:
        while place >= 0:
            middle = place + len(content) // 2
            stream.seek(middle)
            stream.write(bytes([held[middle] ^ 1]))
            place = held.find(content, place + 1)


def _payload(held: StoredPayload | None) -> bytes | None:
    return None if held is None else bytes(held.payload)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (errno.ENOSPC, "free space on its disk"),
        (errno.EROFS, "mount its file system for writing"),
        (errno.EIO, "check its disk"),
        (errno.EINVAL, "restore it from a copy"),
    ],
)
def test_a_start_that_the_disk_refuses_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int, remedy: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise lmdb.Error(f"mdb_env_open: {os.strerror(reason)}")

    DiskStore(tmp_path, 1 << 20).close()
    monkeypatch.setattr("bridge.store.disk.environment.lmdb.open", refuse)
    with pytest.raises(CorruptStore, match=remedy):
        DiskStore(tmp_path, 1 << 20)
