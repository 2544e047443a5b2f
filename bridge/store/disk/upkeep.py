"""Maintenance of a store directory: back it up, verify it, compact its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb

from bridge.errors import TraceError
from bridge.store.base import StoredPayload
from bridge.store.checksums import row_is_intact
from bridge.store.directory import (
    CHECKPOINT_FILE,
    DATA_FILE,
    NEW,
    CorruptStore,
    locked,
    private_file,
    replace_file,
    sync_names,
)
from bridge.store.disk.lmdb_store import DiskStore
from bridge.store.pool_directory import refuse_pooled

# (done, of how many); neither is exact while a daemon writes to the store.
Progress = Callable[[int, int], None]
_LOOK_S = 0.2
_ENTRIES_PER_READ = 256  # of one transaction: while it is open, LMDB uses no space again


class CannotCopy(TraceError):
    """A copy of a store cannot be written."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Result of a copy: bytes of the copy (``nbytes``) and of the original file (``was``)."""

    nbytes: int
    was: int


@dataclass(frozen=True, slots=True)
class Payloads:
    """Counts of a store's payloads, rows and bytes, and of damaged rows and lost payloads.

    Trainers see damaged rows and all rows of a lost payload as missing.
    """

    entries: int
    rows: int
    nbytes: int
    damaged_rows: int
    lost_payloads: int


def back_up(directory: Path, destination: Path, progress: Progress) -> Copied:
    """Copy a consistent state of a store to a new directory, also while a daemon serves it.

    Raises:
        CannotCopy: the destination is not empty, or the disk has no room for the copy.
        CorruptStore, SchemaMismatch: there is no store to copy, or its records are in a pool.
    """
    refuse_pooled(directory)
    with closing(DiskStore(directory, 0, readonly=True)) as store:
        with _copy_errors(destination):
            destination.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(destination.iterdir()):
                raise CannotCopy(f"{destination} is not empty; choose a new directory")
        checkpoint = (
            store.read_checkpoint()
        )  # older than the copy; the copy's journal has the newer entries
        copied = _copied(store, destination, progress)
        with _copy_errors(destination):
            if checkpoint is not None:
                replace_file(destination / CHECKPOINT_FILE, [checkpoint])
    return copied


def compact(directory: Path, progress: Progress) -> Copied:
    """Replace the file of a store by one without free pages; no daemon may serve it.

    Raises:
        StoreBusy: a daemon serves it.
        CannotCopy: there is no room for a second file.
        CorruptStore, SchemaMismatch: it is not a store.
    """
    if not (directory / DATA_FILE).exists():
        raise CorruptStore(f"there is no store in {directory}; correct the directory")
    lock = locked(directory)
    try:
        with closing(DiskStore(directory, 0, readonly=True)) as store:
            return _copied(store, directory, progress)
    finally:
        os.close(lock)


def check_payloads(store: DiskStore, progress: Progress) -> Payloads:
    """Read every payload and compare each of its rows with its checksum."""
    numbers = store.numbers().tolist()
    rows = nbytes = damaged = lost = 0
    for begin in range(0, len(numbers), _ENTRIES_PER_READ):
        missing = []
        with store.reader() as read:
            for number in numbers[begin : begin + _ENTRIES_PER_READ]:
                held = read(number)
                if held is None:
                    missing.append(number)
                    continue
                count, broken = _check(number, held)
                rows, damaged, nbytes = rows + count, damaged + broken, nbytes + len(held.payload)
        lost += len(store.without_payload(missing))
        progress(min(begin + _ENTRIES_PER_READ, len(numbers)), len(numbers))
    return Payloads(len(numbers), rows, nbytes, damaged, lost)


def _check(number: int, held: StoredPayload) -> tuple[int, int]:
    """Return (rows, rows that fail their checksum) of a payload."""
    assert held.checksums is not None
    count = len(held.checksums)
    row_bytes, rest = divmod(len(held.payload), max(1, count))
    if rest or not count:
        return count, max(1, count)
    rows = (held.payload[at * row_bytes : (at + 1) * row_bytes] for at in range(count))
    intact = sum(
        row_is_intact(number, at, row, expected)
        for at, (row, expected) in enumerate(zip(rows, held.checksums.tolist(), strict=True))
    )
    return count, count - intact


def _copied(store: DiskStore, destination: Path, progress: Progress) -> Copied:
    """Write a copy without free pages; rename it when it is complete."""
    new, old = destination / (NEW + DATA_FILE), store.directory / DATA_FILE
    with _copy_errors(destination):
        new.unlink(missing_ok=True)
        file = private_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with ThreadPoolExecutor(1, "copy") as copier:
                copying = copier.submit(store.copy_to, file)
                while wait([copying], _LOOK_S).not_done:
                    progress(os.fstat(file).st_size, max(store.usage().disk_bytes, 1))
                copying.result()
            os.fsync(file)
            copied = Copied(os.fstat(file).st_size, old.stat().st_size)
            new.replace(destination / DATA_FILE)
            sync_names(destination)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
    progress(1, 1)
    return copied


@contextmanager
def _copy_errors(destination: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, lmdb.Error) as error:
        raise CannotCopy(
            f"cannot write a copy of the store to {destination} ({error}); "
            "free space there or choose another directory"
        ) from error
