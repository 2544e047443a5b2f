"""The LMDB environment of a store; it reopens the file after a failed write.

LMDB refuses everything after a failed write of its meta page, reads too, until the file is opened
again. It keeps the pages that a reader may still need, so a reader that was killed costs all space
freed since then, until a process checks for dead readers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from bridge.store.directory import DATA_FILE, NEW, prepare_files, sync_names
from bridge.store.disk.free_pages import UnreadablePages, lost_pages

ABOUT = b"about"
JOURNAL, PAYLOAD, SUMS = ENTRY_TABLES = (b"journal", b"payload", b"sums")
_TABLES = (ABOUT, *ENTRY_TABLES)
SCHEMA_KEY = b"schema"
_FIRST_MAP = 1 << 20
_ATTEMPTS = 3


class CutOff(Exception):
    """The file is too short: it ends before pages that are in use."""


class Environment:
    """The four tables of ``directory`` in a map of ``map_bytes``.

    Raises:
        CutOff: the file has lost its end.
        lmdb.Error, OSError: it cannot be opened.
    """

    def __init__(
        self, directory: Path, map_bytes: int, *, readonly: bool = False, sync: bool = True
    ) -> None:
        self._directory = directory
        self._map_bytes = map_bytes
        self._readonly = readonly
        self._sync = sync
        self._is_doubtful = False
        self._is_stuck = False  # open as read-only, because it cannot be opened for writing
        self._open(readonly)

    def snapshot(self) -> Any:
        """Begin a read transaction; keep it short, because LMDB keeps the pages that it may read.

        Raises:
            lmdb.Error, OSError, CutOff: the file is unreadable now.
        """
        self._reopen()
        for _ in range(_ATTEMPTS):
            try:
                return self._env.begin(buffers=True)
            except lmdb.MapResizedError:
                self._env.set_mapsize(0)  # the writer's: the file has grown beyond ours
            except lmdb.ReadersFullError:
                self.forget_dead_readers()
        return self._env.begin(buffers=True)

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Yield a write transaction; commit and sync it unless the context raises.

        Raises:
            lmdb.MapFullError: there is no room in the map; nothing is written.
            lmdb.Error: it is not acknowledged, but may be there when the file is opened again.
        """
        self._reopen(to_write=True)
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                yield txn
        except lmdb.MapFullError:
            raise
        except lmdb.Error:
            self._is_doubtful = True
            raise

    def table(self, name: bytes) -> Any:
        """Return a table; the handle changes after the file has been reopened."""
        return self._tables[name]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._page_bytes

    def live_bytes(self, txn: Any) -> int:
        """Return the bytes of all pages with entries, as a transaction sees them."""
        pages = 0
        for name in ENTRY_TABLES:
            stat = txn.stat(self._tables[name])
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int(pages * self._page_bytes)

    def grow(self, map_bytes: int) -> None:
        """Set the maximum size of the file; raise lmdb.Error."""
        self._reopen(to_write=True)
        if map_bytes != self._map_bytes:
            self._env.set_mapsize(_whole_pages(map_bytes))
            self._map_bytes = map_bytes

    def forget_dead_readers(self) -> None:
        """Free the pages that killed readers have kept."""
        with contextlib.suppress(lmdb.Error):
            self._env.reader_check()

    def copy_to(self, file: int) -> None:
        """Write a consistent copy without free pages to a descriptor; raise lmdb.Error."""
        with self.snapshot() as txn:
            self._env.copyfd(file, compact=True, txn=txn)

    def close(self) -> None:
        """Close the file."""
        self._env.close()

    def _reopen(self, *, to_write: bool = False) -> None:
        """Reopen the file if an error has closed it; raise if that fails.

        On a read-only file system it opens the file for reading, and every write tries again.
        """
        if not self._is_doubtful or (self._is_stuck and not to_write):
            return
        if not self._is_stuck:
            with contextlib.suppress(lmdb.Error):
                self._env.begin().abort()
                self._is_doubtful = False
                return
        self._env.close()
        try:
            self._open(self._readonly)
        except (lmdb.Error, OSError):
            self._open(readonly=True)
            self._is_stuck = True
            return
        self._is_doubtful = self._is_stuck = False

    def _open(self, readonly: bool) -> None:
        if not readonly:
            prepare_files(self._directory)
        self._env = lmdb.open(
            str(self._directory),
            map_size=_whole_pages(self._map_bytes),
            max_dbs=len(_TABLES),
            readonly=readonly,
            create=False,
            mode=0o600,
            # Rows are read a few at a time in no order: read-ahead would only evict pages.
            readahead=False,
            sync=self._sync,
        )
        try:
            self._page_bytes = int(self._env.stat()["psize"])
            self._check_length()
            self._tables = {name: self._env.open_db(name, create=False) for name in _TABLES}
        except BaseException:
            self._env.close()
            raise
        self.forget_dead_readers()

    def _check_length(self) -> None:
        """Refuse a file whose end is lost, because reading its map there kills the process."""
        path = self._directory / DATA_FILE
        for attempt in range(_ATTEMPTS):
            length = path.stat().st_size
            used = (self._env.info()["last_pgno"] + 1) * self._page_bytes
            if length >= used:
                return
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                lost = lost_pages(file, self._page_bytes)
            except UnreadablePages as error:
                lost = -1
                if attempt + 1 == _ATTEMPTS:  # a daemon may have written meanwhile
                    raise CutOff(f"it is cut off at {length} of {used} bytes") from error
            finally:
                os.close(file)
            if lost == 0:
                return
        raise CutOff(f"it is cut off at {length} of {used} bytes and has lost {lost} pages")


def make_environment(directory: Path, schema: int, *, sync: bool = True) -> None:
    """Create an empty store atomically if there is none; raise lmdb.Error or OSError."""
    if (directory / DATA_FILE).exists() or (directory / DATA_FILE).is_symlink():
        return
    new = directory / (NEW + DATA_FILE)
    new.unlink(missing_ok=True)
    with lmdb.open(
        str(new),
        map_size=_FIRST_MAP,
        subdir=False,
        lock=False,
        max_dbs=len(_TABLES),
        mode=0o600,
        sync=sync,
    ) as env:
        tables = {name: env.open_db(name) for name in _TABLES}
        with env.begin(write=True) as txn:
            txn.put(SCHEMA_KEY, str(schema).encode(), db=tables[ABOUT])
    new.replace(directory / DATA_FILE)
    if sync:
        sync_names(directory)


def _whole_pages(nbytes: int) -> int:
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE
