"""The disk tier: an LMDB file in which an acknowledged entry survives kill -9 and a power cut.

Four tables: ``about`` (schema version), ``journal`` (number -> header), ``payload`` (number ->
record bytes) and ``sums`` (number -> row checksums). Headers stand apart so that a restart reads
them and not the records. Space of dropped entries is used again; the file itself does not shrink.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from bridge.errors import SchemaMismatch, StoreFull
from bridge.store.base import WHOLE, Entry, Fill, Held, Reader, Wanted
from bridge.store.directory import Ballast, CorruptStore, locked
from bridge.store.row_sums import row_sums
from bridge.wire.envelope import SCHEMA_VERSION

_SCHEMA_KEY = b"schema"
_TABLES = (b"journal", b"payload", b"sums")
_PAGE = 4096
_SMALLEST_LIMIT = 1 << 20
_DISK_MARGIN = 1 << 20
_DROPS_A_COMMIT = 256
_REPLAYED_BYTES = 4 << 20
_number = struct.Struct(">Q")


class DiskStore:
    """A directory whose files take at most ``limit_bytes``.

    Without ``sync`` what is written survives the process but not a power cut.

    Raises:
        StoreBusy: another daemon has the directory.
        SchemaMismatch: the store was written with another schema version.
        CorruptStore: the file is not readable, or not there when ``readonly``.
    """

    tier = "disk"

    def __init__(
        self, directory: Path, limit_bytes: int, *, readonly: bool = False, sync: bool = True
    ) -> None:
        self.directory = directory
        self._limit = max(limit_bytes, _SMALLEST_LIMIT)
        self._lock = None if readonly else locked(directory)
        self._folder: int | None = None
        self._ballast = Ballast(directory, self._limit // 16)
        self._env = _open(directory, self._limit - self._ballast.nbytes, readonly, sync)
        try:
            self._folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._prepare(readonly)
        except BaseException:
            self.close()
            raise

    def _prepare(self, readonly: bool) -> None:
        with _readable(self.directory):
            self._check_length()
            self._check_schema(readonly)
            self._tables = {name: self._env.open_db(name, create=not readonly) for name in _TABLES}
            self._next, self._live = 0, 0
            with self._env.begin(buffers=True) as txn:
                for table in self._tables.values():
                    for key, value in txn.cursor(table):
                        self._live += _space(len(value))
                        self._next = max(self._next, _number.unpack(key)[0] + 1)
        if not readonly:
            self._ballast.load()

    def _check_length(self) -> None:
        """Refuse a truncated file: to read its map beyond the end would kill the process."""
        length = (self.directory / "data.mdb").stat().st_size
        used = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if length < used:
            raise CorruptStore(
                f"the store in {self.directory} is cut off at {length} of {used} bytes; "
                "restore it from a copy, or move it away and serve an empty --dir"
            )

    def _check_schema(self, readonly: bool) -> None:
        self._about = self._env.open_db(b"about", create=not readonly)
        with self._env.begin(self._about, write=not readonly) as txn:
            found = txn.get(_SCHEMA_KEY)
            if found is None and not readonly:
                found = str(SCHEMA_VERSION).encode()
                txn.put(_SCHEMA_KEY, found)
        if found != str(SCHEMA_VERSION).encode():
            version = "no" if found is None else found.decode("ascii", "replace")
            raise SchemaMismatch(
                f"the store in {self.directory} has schema {version} and this process writes "
                f"{SCHEMA_VERSION}; choose another --dir or use the version that wrote it"
            )

    # --- writing

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Write all entries in one synced transaction or raise StoreFull."""
        numbers = list(range(self._next, self._next + len(entries)))
        self.write(list(zip(numbers, entries, strict=True)))
        return numbers

    def write(self, numbered: Sequence[tuple[int, Entry]]) -> None:
        """Write entries under numbers of the caller's, ascending; all of them or StoreFull."""
        needed = sum(_entry_space(entry) for _, entry in numbered)
        vital = all(entry.vital for _, entry in numbered)
        # What is kept back is for vital entries and drop(): LMDB writes new pages before it can
        # give up old ones.
        if self._live + needed > self._limit - (0 if vital else self._limit // 8):
            raise StoreFull(self._over_limit())
        try:
            self._commit(numbered)
        except StoreFull:
            if not vital:
                raise
            self._ballast.unload()
            self._commit(numbered)
        self._live += needed
        self._next = max(self._next, numbered[-1][0] + 1)

    def _commit(self, numbered: Sequence[tuple[int, Entry]]) -> None:
        try:
            with self._env.begin(write=True) as txn:
                for number, entry in numbered:
                    self._put(txn, number, entry)
        except lmdb.MapFullError as error:
            raise StoreFull(self._over_limit()) from error
        except lmdb.Error as error:
            needed = sum(_entry_space(entry) for _, entry in numbered)
            raise StoreFull(self._why_not_written(error, needed)) from error

    def _put(self, txn: Any, number: int, entry: Entry) -> None:
        key = _number.pack(number)
        txn.put(key, entry.header, append=True, db=self._tables[b"journal"])
        if entry.payload is not None:
            sums = row_sums(number, entry.payload, entry.row_bytes)
            txn.put(key, entry.payload, append=True, db=self._tables[b"payload"])
            txn.put(key, sums.data, append=True, db=self._tables[b"sums"])

    def _over_limit(self) -> str:
        return (
            f"the store in {self.directory} has reached its limit of {self._limit} bytes; "
            "collect old steps (python -m bridge gc), raise --disk-limit or serve from another "
            "--dir"
        )

    def _why_not_written(self, error: lmdb.Error, needed: int) -> str:
        # LMDB tells a write that the disk took half of as an I/O error, so look at the disk.
        assert self._folder is not None
        disk = os.fstatvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < needed + _DISK_MARGIN:
            return f"the disk of {self.directory} is full; free space or serve from another --dir"
        return (
            f"writing to the store in {self.directory} failed ({error}); "
            "check the disk or serve from another --dir"
        )

    def in_memory(self, numbers: Iterable[int]) -> list[memoryview] | None:
        """Return nothing: files can change behind the daemon's back."""
        return None

    def drop(self, numbers: Sequence[int]) -> None:
        """Delete entries, a few hundred a transaction, also when limit or disk is reached."""
        ascending = sorted(numbers)
        for begin in range(0, len(ascending), _DROPS_A_COMMIT):
            batch = ascending[begin : begin + _DROPS_A_COMMIT]
            try:
                self._delete(batch)
            except lmdb.Error:
                self._ballast.unload()
                self._env.set_mapsize(self._limit)
                self._delete_at_last(batch)
        if numbers:
            self._turn_over()
        self._ballast.load()

    def _turn_over(self) -> None:
        """Commit once more: LMDB uses pages again from the second transaction after the drop on."""
        with self._env.begin(write=True) as txn:
            txn.put(b"dropped", _number.pack(self._next), db=self._about)

    def _delete_at_last(self, numbers: Sequence[int]) -> None:
        try:
            self._delete(numbers)
        except lmdb.Error as error:
            raise StoreFull(
                f"entries of the store in {self.directory} cannot be deleted ({error}); "
                "free a little space on its disk"
            ) from error

    def _delete(self, numbers: Sequence[int]) -> None:
        freed = 0
        with self._env.begin(write=True, buffers=True) as txn:
            for number in numbers:
                for table in self._tables.values():
                    value = txn.get(_number.pack(number), db=table)
                    if value is not None:
                        freed += _space(len(value))
                        txn.delete(_number.pack(number), db=table)
        self._live -= freed

    # --- reading

    @contextmanager
    def reader(self, wanted: Wanted = WHOLE) -> Iterator[Reader]:
        """Give the payload lookup: buffers point into the file's map until the context ends."""
        payloads, sums = self._tables[b"payload"], self._tables[b"sums"]

        with self._env.begin(buffers=True) as txn:

            def read(number: int) -> Held | None:
                key = _number.pack(number)
                payload, row_sums = txn.get(key, db=payloads), txn.get(key, db=sums)
                if payload is None or row_sums is None:
                    return None
                whole = len(row_sums) // 8
                return Held(memoryview(payload), np.frombuffer(row_sums, dtype="<u8", count=whole))

            yield read

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, header) of every entry, oldest first.

        No transaction is open while the caller has one: LMDB has 126 places for readers, and a
        generator that nobody reads to its end would keep one.
        """
        headers = self._headers(0)
        while headers:
            yield from headers
            headers = self._headers(headers[-1][0] + 1)

    def _headers(self, first: int) -> list[tuple[int, bytes]]:
        """Return entries from number ``first`` on, a few MiB of them."""
        found: list[tuple[int, bytes]] = []
        nbytes = 0
        with (
            _readable(self.directory),
            self._env.begin(self._tables[b"journal"]) as txn,
            txn.cursor() as cursor,
        ):
            more = cursor.set_range(_number.pack(first))
            while more and nbytes < _REPLAYED_BYTES:
                key, header = cursor.item()
                found.append((_number.unpack(key)[0], header))
                nbytes += _space(len(header))
                more = cursor.next()
        return found

    def reserve(self, index_bytes: int) -> None:
        """Do nothing: the index lies in memory."""

    def fill(self) -> Fill:
        """Return the bytes that entries take on disk."""
        return Fill(disk_bytes=self._live, disk_limit=self._limit)

    def close(self) -> None:
        """Close the file and let another daemon have the directory."""
        self._env.close()
        for descriptor in (self._folder, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._folder = self._lock = None


def _space(nbytes: int) -> int:
    """Return the bytes that LMDB needs for a value: its own pages if large, else a node."""
    if nbytes > _PAGE // 2:
        return -(-(nbytes + 16) // _PAGE) * _PAGE
    return nbytes + 32


def _entry_space(entry: Entry) -> int:
    payload = 0 if entry.payload is None else memoryview(entry.payload).nbytes
    sums = payload // entry.row_bytes * 8 if entry.row_bytes else 8
    return _space(len(entry.header)) + (_space(payload) + _space(sums) if payload else 0)


def _open(directory: Path, size: int, readonly: bool, sync: bool) -> Any:
    with _readable(directory):
        # Records are read a few rows at a time in no order, so read-ahead would only evict pages.
        return lmdb.open(
            str(directory),
            map_size=size // _PAGE * _PAGE,
            max_dbs=4,
            readonly=readonly,
            readahead=False,
            sync=sync,
        )


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, struct.error) as error:
        raise CorruptStore(
            f"the store in {directory} is not readable ({error}); restore it from a copy, "
            "or move it away and serve an empty --dir"
        ) from error
