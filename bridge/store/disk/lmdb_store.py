"""The disk tier: an LMDB file in which an acknowledged entry survives kill -9 and a power cut.

Four tables: ``about`` (schema version), ``journal`` (number -> header), ``payload`` (number ->
record bytes) and ``sums`` (number -> row checksums). Headers have their own table, so a restart
does not read the records. LMDB reuses the space of deleted entries; the file does not shrink.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from bridge.errors import SchemaMismatch, StoreFailing, StoreFull
from bridge.store.base import WHOLE, Entry, Position, Reader, ReadPlan, StoredPayload, Usage
from bridge.store.checksums import row_checksums
from bridge.store.directory import (
    CHECKPOINT_FILE,
    DATA_FILE,
    CorruptStore,
    ReserveFile,
    locked,
    private_file,
    replace_file,
)
from bridge.store.disk.environment import (
    ABOUT,
    ENTRY_TABLES,
    JOURNAL,
    PAYLOAD,
    SCHEMA_KEY,
    SUMS,
    CutOff,
    Environment,
    make_environment,
)
from bridge.store.disk.room import Room
from bridge.store.journal import STORE_SCHEMA
from bridge.wire.envelope import Buffer

log = logging.getLogger(__name__)

_DISK_MARGIN = 1 << 20
_DELETIONS_PER_COMMIT = 256
_FEWER = 16
_REPLAYED_BYTES = 4 << 20
_PAGE = 4096
_POSITION_KEY = b"position"
_number = struct.Struct(">Q")
_position = struct.Struct(">QQ")


class DiskStore:
    """A directory whose files take at most ``limit_bytes``.

    Without ``sync``, entries survive the process but not a power cut.

    Raises:
        StoreBusy: another daemon uses the directory.
        SchemaMismatch: the store was written with another schema version.
        CorruptStore: the file is unreadable, or it does not exist and ``readonly`` is set.
    """

    tier = "disk"

    def __init__(
        self, directory: Path, limit_bytes: int, *, readonly: bool = False, sync: bool = True
    ) -> None:
        self.directory = directory
        self.room = Room.of(limit_bytes)
        self._lock = None if readonly else locked(directory)
        self._folder: int | None = None
        self._reserve_file = ReserveFile(directory, self.room.reserve_file)
        self._undeleted: list[int] = []
        self._rewinds = False
        try:
            self._env = _opened(directory, self.room.row_file, readonly, sync)
        except BaseException:
            self._release()
            raise
        try:
            self._folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with _readable(directory), self._env.snapshot() as txn:
                self._check_schema(txn)
                self._live = self._env.live_bytes(txn)
                self._next, self._deletions = self._position(txn)
        except BaseException:
            self.close()
            raise
        if not readonly:
            self._reserve_file.load()

    def _check_schema(self, txn: Any) -> None:
        found = txn.get(SCHEMA_KEY, db=self._env.table(ABOUT))
        if found is None or bytes(found) != str(STORE_SCHEMA).encode():
            version = "no" if found is None else bytes(found).decode("ascii", "replace")
            raise SchemaMismatch(
                f"the store in {self.directory} has schema {version} and this process writes "
                f"{STORE_SCHEMA}; choose another --dir or use the version that wrote it"
            )

    def _position(self, txn: Any) -> tuple[int, int]:
        """Return (number of the next entry, count of deletions)."""
        noted = txn.get(_POSITION_KEY, db=self._env.table(ABOUT))
        end, deletions = (0, 0) if noted is None else _position.unpack(noted)
        for name in ENTRY_TABLES:
            with txn.cursor(self._env.table(name)) as cursor:
                if cursor.last():
                    end = max(end, _number.unpack(cursor.key())[0] + 1)
        return end, deletions

    @property
    def next(self) -> int:
        """The number of the next entry."""
        return self._next

    # --- writing

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Write all entries in one synced transaction or raise StoreFull."""
        numbers = list(range(self._next, self._next + len(entries)))
        self.write(list(zip(numbers, entries, strict=True)))
        return numbers

    def write(self, numbered: Sequence[tuple[int, Entry]]) -> None:
        """Write entries under ascending numbers of the caller: all of them, or raise StoreFull."""
        if not numbered:
            return
        needed = sum(_entry_space(entry) for _, entry in numbered)
        reserved = all(entry.reserved for _, entry in numbered)
        frees_space = reserved and all(entry.frees_space for _, entry in numbered)
        limit = (
            self.room.steps if frees_space else self.room.reserved if reserved else self.room.rows
        )
        if self._live + needed > limit:
            raise StoreFull(self._over_limit())

        def put(txn: Any) -> None:
            for number, entry in numbered:
                self._put(txn, number, entry)

        self._commit(put, needed, may_grow=reserved)
        self._next = max(self._next, numbered[-1][0] + 1)

    def _put(self, txn: Any, number: int, entry: Entry) -> None:
        key = _number.pack(number)
        txn.put(key, entry.header, append=True, db=self._env.table(JOURNAL))
        if entry.payload is not None:
            sums = row_checksums(number, entry.payload, entry.row_bytes)
            txn.put(key, entry.payload, append=True, db=self._env.table(PAYLOAD))
            txn.put(key, sums.data, append=True, db=self._env.table(SUMS))

    def _commit(self, work: Callable[[Any], None], needed: int, *, may_grow: bool) -> None:
        """Run ``work`` in one transaction; if it fails, free space and try once more.

        Raises:
            StoreFull, StoreFailing: the store has nothing of this work.
        """
        try:
            self._try(work)
        except lmdb.Error:
            self._env.forget_dead_readers()
            with self._reasons(needed):
                if may_grow:
                    self._reserve_file.unload()
                    self._env.grow(self.room.file)
                self._try(work)

    def _try(self, work: Callable[[Any], None]) -> None:
        try:
            with self._env.writing() as txn:
                if self._rewinds:
                    self._rewind(txn)
                work(txn)
                live = self._env.live_bytes(txn)
        except lmdb.MapFullError:
            raise
        except lmdb.Error:
            self._rewinds = True
            raise
        self._rewinds, self._live = False, live

    def _rewind(self, txn: Any) -> None:
        """Delete entries of a failed commit, because the next one reuses their numbers."""
        for name in ENTRY_TABLES:
            with txn.cursor(self._env.table(name)) as cursor:
                found = cursor.set_range(_number.pack(self._next))
                while found:
                    found = cursor.delete()

    @contextmanager
    def _reasons(self, needed: int) -> Iterator[None]:
        """Translate errors of LMDB and the system to StoreFull or StoreFailing."""
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFull(self._over_limit()) from error
        except (lmdb.Error, OSError, CutOff) as error:
            if isinstance(error, lmdb.DiskError) or self._disk_is_full(needed):
                raise StoreFull(
                    f"the disk of {self.directory} is full; free space or serve from another --dir"
                ) from error
            raise StoreFailing(
                f"writing to the store in {self.directory} failed ({error}); "
                "check the disk or serve from another --dir"
            ) from error

    def _disk_is_full(self, needed: int) -> bool:
        """Whether the disk is full: LMDB reports a partial write as an I/O error."""
        assert self._folder is not None
        disk = os.fstatvfs(self._folder)
        return disk.f_bavail * disk.f_frsize < needed + _DISK_MARGIN

    def _over_limit(self) -> str:
        return (
            f"the store in {self.directory} has reached its limit of {self.room.limit} bytes; "
            "collect old steps (python -m bridge gc), raise --disk-limit or serve from another "
            "--dir"
        )

    def in_memory(self, numbers: Iterable[int]) -> list[memoryview] | None:
        """Return None, because other programs can change files."""
        return None

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete entries, a few hundred per transaction, also in a full store or on a full disk.

        Raises:
            StoreFull: some entries remain; the next call tries them again.
        """
        pending = sorted({*numbers, *self._undeleted})
        self._undeleted = pending
        if not pending:
            return
        self._env.forget_dead_readers()
        count = _DELETIONS_PER_COMMIT
        while self._undeleted:
            try:
                self._delete(self._undeleted[:count])
            except StoreFull:
                if count == 1:
                    raise
                count = max(
                    1, count // _FEWER
                )  # a smaller deletion needs less space and frees some
            else:
                self._undeleted = self._undeleted[count:]
        self._turn_over()
        self._reserve_file.load()

    def _delete(self, numbers: Sequence[int]) -> None:
        keys = [_number.pack(number) for number in numbers]

        def delete(txn: Any) -> None:
            for name in ENTRY_TABLES:
                table = self._env.table(name)
                for key in keys:
                    txn.delete(key, db=table)
            self._note_position(txn)

        self._commit(delete, 0, may_grow=True)
        self._deletions += 1

    def _note_position(self, txn: Any) -> None:
        """Store the count of deletions and the next number, which must not be used again."""
        noted = _position.pack(self._next, self._deletions + 1)
        txn.put(_POSITION_KEY, noted, db=self._env.table(ABOUT))

    def _turn_over(self) -> None:
        """Commit again: LMDB reuses pages from the second transaction after a deletion on."""
        with self._reasons(0):
            self._commit(self._note_position, 0, may_grow=True)
            self._deletions += 1
            self._env.grow(self.room.row_file)

    # --- reading

    @contextmanager
    def reader(self, plan: ReadPlan = WHOLE) -> Iterator[Reader]:
        """Yield the payload lookup; buffers are views of the mapped file inside the context."""
        with self._reasons(0):
            snapshot = self._env.snapshot()
        with snapshot as txn:
            payloads, sums = self._env.table(PAYLOAD), self._env.table(SUMS)

            def read(number: int) -> StoredPayload | None:
                key = _number.pack(number)
                try:
                    payload, row_checksums = txn.get(key, db=payloads), txn.get(key, db=sums)
                except lmdb.Error as error:
                    log.warning("entry %d of the store is not readable: %s", number, error)
                    return None
                if payload is None or row_checksums is None:
                    return None
                whole = len(row_checksums) // 8
                return StoredPayload(
                    memoryview(payload), np.frombuffer(row_checksums, dtype="<u8", count=whole)
                )

            yield read

    def replay(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (number, header) of every entry from number ``first`` on, oldest first.

        The generator keeps no transaction open between items: LMDB allows 126 readers, and a
        generator that its caller abandons would occupy one.
        """
        headers = self._headers(first)
        while headers:
            yield from headers
            headers = self._headers(headers[-1][0] + 1)

    def _headers(self, first: int) -> list[tuple[int, bytes]]:
        """Return (number, header) of entries from number ``first`` on, a few MiB at most."""
        found: list[tuple[int, bytes]] = []
        nbytes = 0
        with (
            _readable(self.directory),
            self._env.snapshot() as txn,
            txn.cursor(self._env.table(JOURNAL)) as cursor,
        ):
            more = cursor.set_range(_number.pack(first))
            while more and nbytes < _REPLAYED_BYTES:
                key, header = cursor.item()
                found.append((_number.unpack(key)[0], bytes(header)))
                nbytes += _space(len(header))
                more = cursor.next()
        return found

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of all entries."""
        with (
            _readable(self.directory),
            self._env.snapshot() as txn,
            txn.cursor(self._env.table(JOURNAL)) as cursor,
        ):
            keys = b"".join(cursor.iternext(keys=True, values=False))
        return np.frombuffer(keys, dtype=">u8").astype(np.int64)

    def without_payload(self, numbers: Iterable[int]) -> list[int]:
        """Return the numbers of rows entries whose payload is lost."""
        with self._env.snapshot() as txn:

            def is_lost(number: int) -> bool:
                key = _number.pack(number)
                try:
                    header, payload, sums = (
                        txn.get(key, db=self._env.table(name)) for name in ENTRY_TABLES
                    )
                except lmdb.Error:
                    return True
                return header is not None and (payload is None) != (sums is None)

            return [number for number in numbers if is_lost(number)]

    def copy_to(self, file: int) -> None:
        """Write a consistent copy without free pages to a descriptor; raise lmdb.Error.

        LMDB reuses no space meanwhile.
        """
        self._env.copy_to(file)

    def position(self) -> Position | None:
        """Return the state of the journal, None while deletions are pending."""
        return None if self._undeleted else Position(self._next, self._deletions)

    def read_checkpoint(self) -> Buffer | None:
        """Return the newest checkpoint, None if it is missing or unreadable."""
        try:
            file = private_file(self.directory / CHECKPOINT_FILE, os.O_RDONLY)
        except OSError:
            return None
        try:
            is_empty = os.fstat(file).st_size == 0
            return b"" if is_empty else memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(file)

    def checkpoint_room(self) -> int:
        """Return the maximum bytes of a checkpoint."""
        return self.room.checkpoint

    def write_checkpoint(self, content: Iterable[Buffer]) -> bool:
        """Replace the checkpoint; return False if the disk has no room for both."""
        try:
            replace_file(self.directory / CHECKPOINT_FILE, content)
        except OSError as error:
            log.info("the daemon cannot write a checkpoint of the index: %s", error)
            return False
        return True

    def reserve(self, index_bytes: int) -> None:
        """Do nothing, because the index is in memory."""

    def usage(self) -> Usage:
        """Return the bytes of the entries on disk."""
        return Usage(disk_bytes=self._live, disk_limit=self.room.limit)

    def close(self) -> None:
        """Close the file and unlock the directory."""
        self._env.close()
        self._release()

    def _release(self) -> None:
        for descriptor in (self._folder, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._folder = self._lock = None


def _space(nbytes: int) -> int:
    """Return the bytes of a value in LMDB: own pages if it is large, else a node."""
    if nbytes > _PAGE // 2:
        return -(-(nbytes + 16) // _PAGE) * _PAGE
    return nbytes + 32


def _entry_space(entry: Entry) -> int:
    payload = 0 if entry.payload is None else memoryview(entry.payload).nbytes
    sums = payload // entry.row_bytes * 8 if entry.row_bytes else 8
    return _space(len(entry.header)) + (_space(payload) + _space(sums) if payload else 0)


def _opened(directory: Path, map_bytes: int, readonly: bool, sync: bool) -> Environment:
    with _readable(directory):
        if readonly:
            _refuse_without_store(directory)
        else:
            make_environment(directory, STORE_SCHEMA, sync=sync)
        return Environment(directory, map_bytes, readonly=readonly, sync=sync)


def _refuse_without_store(directory: Path) -> None:
    """Raise CorruptStore if a path has no store; raise OSError if it is not accessible."""
    try:
        (directory / DATA_FILE).stat()
        return
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise CorruptStore(f"{directory} is a file; give the directory of a store") from None
    what = f"{directory} holds no store" if directory.exists() else f"there is no {directory}"
    raise CorruptStore(f"{what}; give the --dir with which the bridge was started")


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, struct.error, CutOff) as error:
        raise CorruptStore(
            f"the store in {directory} is not readable ({error}); {_remedy(error)}"
        ) from error
    except OSError as error:
        raise CorruptStore(
            f"the store in {directory} cannot be opened ({error.strerror or error}); free space "
            "on its disk and make its files this user's, or choose another --dir"
        ) from error


def _remedy(error: Exception) -> str:
    """Return the fix; a store on a read-only or full disk is not damaged."""
    reason = str(error)  # LMDB reports system errors as text
    if os.strerror(errno.ENOSPC) in reason:
        return "free space on its disk, or choose another --dir"
    if os.strerror(errno.EROFS) in reason:
        return "mount its file system for writing, or choose another --dir"
    if os.strerror(errno.EIO) in reason:
        return "check its disk, or choose another --dir"
    return "restore it from a copy, or move it away and serve an empty --dir"
