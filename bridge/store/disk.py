"""The disk tier: an LMDB file in which an acknowledged entry survives kill -9 and a power cut.

Three tables: ``about`` (schema version), ``journal`` (number -> header) and ``payload``
(number -> record bytes). Headers stand apart so that a restart reads them and not the records.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from bridge.errors import SchemaMismatch, StoreFull, TraceError
from bridge.store.base import Entry, Reader
from bridge.wire.envelope import SCHEMA_VERSION

_SCHEMA_KEY = b"schema"
_PAGE = 4096
_SMALLEST_LIMIT = 1 << 20
_DISK_MARGIN = 1 << 20
_number = struct.Struct(">Q")


class StoreBusy(TraceError):
    """Another daemon writes to the directory."""


class CorruptStore(TraceError):
    """The directory does not hold a readable store."""


class DiskStore:
    """A directory with one LMDB file of at most ``limit_bytes``.

    Raises:
        StoreBusy: another daemon has the directory.
        SchemaMismatch: the store was written with another schema version.
        CorruptStore: the file is not readable, or not there when ``readonly``.
    """

    tier = "disk"
    may_rot = True

    def __init__(self, directory: Path, limit_bytes: int, *, readonly: bool = False) -> None:
        self.directory = directory
        self._lock = None if readonly else _lock(directory)
        self._env = _open(directory, limit_bytes, readonly)
        try:
            self._prepare(readonly)
        except BaseException:
            self.close()
            raise

    def _prepare(self, readonly: bool) -> None:
        with _readable(self.directory):
            self._check_length()
            self._check_schema(readonly)
            self._tables = {
                name: self._env.open_db(name, create=not readonly)
                for name in (b"journal", b"payload")
            }
            with self._env.begin(self._tables[b"journal"]) as txn, txn.cursor() as cursor:
                self._next = _number.unpack(cursor.key())[0] + 1 if cursor.last() else 0

    def _check_length(self) -> None:
        """Refuse a truncated file: to read its map beyond the end would kill the process."""
        length = (self.directory / "data.mdb").stat().st_size
        if length < self.used_bytes():
            raise CorruptStore(
                f"the store in {self.directory} is cut off at {length} of {self.used_bytes()} "
                "bytes; restore it from a copy, or move it away and serve an empty --dir"
            )

    def _check_schema(self, readonly: bool) -> None:
        about = self._env.open_db(b"about", create=not readonly)
        with self._env.begin(about, write=not readonly) as txn:
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

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Write all entries in one synced transaction or raise StoreFull."""
        numbers = list(range(self._next, self._next + len(entries)))
        try:
            with self._env.begin(write=True) as txn:
                for number, entry in zip(numbers, entries, strict=True):
                    self._put(txn, _number.pack(number), entry)
        except lmdb.Error as error:
            raise StoreFull(self._why_full(error, entries)) from error
        self._next += len(entries)
        return numbers

    def _why_full(self, error: lmdb.Error, entries: Sequence[Entry]) -> str:
        if isinstance(error, lmdb.MapFullError):
            return (
                f"the store in {self.directory} has reached its limit of {self.limit_bytes()} "
                "bytes; raise --disk-limit or serve from another --dir"
            )
        # LMDB tells a write that the disk took half of as an I/O error, so look at the disk.
        disk = os.statvfs(self.directory)
        if disk.f_bavail * disk.f_frsize < sum(entry.nbytes for entry in entries) + _DISK_MARGIN:
            return f"the disk of {self.directory} is full; free space or serve from another --dir"
        return (
            f"writing to the store in {self.directory} failed ({error}); "
            "check the disk or serve from another --dir"
        )

    def _put(self, txn: Any, key: bytes, entry: Entry) -> None:
        txn.put(key, entry.header, append=True, db=self._tables[b"journal"])
        if entry.payload is not None:
            txn.put(key, entry.payload, append=True, db=self._tables[b"payload"])

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Give the payload lookup: buffers point into the file's map until the context ends."""
        with self._env.begin(self._tables[b"payload"], buffers=True) as txn:
            yield lambda number: txn.get(_number.pack(number))

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, header) of every entry, oldest first."""
        with (
            _readable(self.directory),
            self._env.begin(self._tables[b"journal"]) as txn,
            txn.cursor() as cursor,
        ):
            for key, header in cursor:
                yield _number.unpack(key)[0], header

    def used_bytes(self) -> int:
        """Return the size of the file's used part."""
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def limit_bytes(self) -> int:
        """Return the size that the file may reach."""
        return int(self._env.info()["map_size"])

    def close(self) -> None:
        """Close the file and let another daemon have the directory."""
        self._env.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _open(directory: Path, limit_bytes: int, readonly: bool) -> Any:
    size = max(limit_bytes, _SMALLEST_LIMIT) // _PAGE * _PAGE
    with _readable(directory):
        # Records are read a few rows at a time in no order, so read-ahead would only evict pages.
        return lmdb.open(
            str(directory), map_size=size, max_dbs=3, readonly=readonly, readahead=False
        )


def _lock(directory: Path) -> int:
    """Hold the directory for this process; the kernel lets go when the process ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptStore(
            f"cannot use {directory} as a store ({error.strerror}); choose another --dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreBusy(
            f"another bridge daemon serves {directory}; stop it or choose another --dir"
        ) from error
    return descriptor


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, struct.error) as error:
        raise CorruptStore(
            f"the store in {directory} is not readable ({error}); restore it from a copy, "
            "or move it away and serve an empty --dir"
        ) from error
