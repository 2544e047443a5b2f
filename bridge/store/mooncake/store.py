"""The Mooncake tier: payloads in a pool of memory, their journal in a local directory.

The pool has only payloads, for three reasons. Mooncake cannot list its keys, so a start could not
replay a journal there. Headers are small and many. Row checksums outside the pool detect rows that
the pool has altered. Acknowledged records survive the daemon, but not the processes of the pool:
rows in their memory are then missing.

Journal and pool are written at the same time and an entry is held when both are. What a crash left
half done is found at the next start: a header without payload is dropped, and payloads without
header have the numbers that come next. A dropped payload leaves the pool before its header.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bridge.errors import StoreFull
from bridge.store.base import WHOLE, Entry, Position, Reader, ReadPlan, StoredPayload, Usage
from bridge.store.checksums import row_checksums, row_is_intact
from bridge.store.disk.lmdb_store import DiskStore
from bridge.store.mooncake.pool import Pool, PoolUnreachable
from bridge.store.mooncake.reader import Note, PoolReader
from bridge.store.pool_directory import next_opening
from bridge.wire.envelope import Buffer

log = logging.getLogger(__name__)

_MAX_ENTRIES = 4096  # per append; a loop iteration of the daemon has a few hundred


class MooncakeStore:
    """Payloads in the pool of ``master``; the journal in ``directory`` takes ``limit_bytes``.

    An empty payload reads as None, because the pool has no empty values.

    Raises:
        NoMooncake, PoolUnreachable: the pool is not available.
        StoreBusy, SchemaMismatch, CorruptStore: see DiskStore.
    """

    tier = "Mooncake"

    def __init__(self, directory: Path, limit_bytes: int, master: str) -> None:
        self._journal = DiskStore(directory, limit_bytes)
        try:
            numbers: list[int] = self._journal.numbers().tolist()
            self._name, self._opening = next_opening(directory, empty=not numbers)
            self._pool = Pool(master)
            self._journaler = ThreadPoolExecutor(1, "journal")
            self._next = self._journal.next
            self._pool_bytes = 0
            self._undeleted: list[int] = []
            self._settle(numbers)
        except BaseException:
            self._journal.close()
            raise

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Write all headers in one synced transaction and all payloads to the pool.

        Raises:
            StoreFull: journal or pool has no room, or the pool does not answer.
        """
        assert len(entries) <= _MAX_ENTRIES
        numbers = list(range(self._next, self._next + len(entries)))
        numbered = list(zip(numbers, entries, strict=True))
        self._next += len(entries)
        payloads = {
            self._key(number, self._opening): entry.payload
            for number, entry in numbered
            if entry.payload is not None and _nbytes(entry.payload)
        }
        journaling = self._journaler.submit(self._write, numbered)
        try:
            if payloads:
                self._pool.put(payloads)
            journaling.result()
        except (StoreFull, PoolUnreachable) as error:
            wait([journaling])
            self.delete(numbers)
            raise StoreFull(str(error)) from error
        return numbers

    def _write(self, numbered: Sequence[tuple[int, Entry]]) -> None:
        self._journal.write(
            [(number, _journaled(number, self._opening, entry)) for number, entry in numbered]
        )
        self._pool_bytes += sum(_nbytes(entry.payload or b"") for _, entry in numbered)

    @contextmanager
    def reader(self, plan: ReadPlan = WHOLE) -> Iterator[Reader]:
        """Yield the payload lookup, which raises PoolUnreachable."""
        with self._notes() as note:
            yield PoolReader(self._pool, note, plan)

    def in_memory(self, numbers: Iterable[int]) -> list[memoryview] | None:
        """Return None, because the pool is memory of other processes."""
        return None

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete entries; the next call tries again those that the pool did not remove."""
        numbers = [*self._undeleted, *numbers]
        notes = self._noted(numbers)
        keys = [
            notes[number][0] if number in notes else self._key(number, self._opening)
            for number in numbers
        ]
        gone = self._removed(numbers, keys)
        self._undeleted = sorted(set(numbers) - set(gone))
        self._pool_bytes -= sum(notes[number][1] for number in set(gone) if number in notes)
        self._journal.delete(gone)

    def reserve(self, index_bytes: int) -> None:
        """Do nothing, because the index is in memory."""

    def replay(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (number, header) of every entry that is not being deleted, oldest first."""
        undeleted = set(self._undeleted)
        return (entry for entry in self._journal.replay(first) if entry[0] not in undeleted)

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of all entries that are not being deleted."""
        return np.setdiff1d(self._journal.numbers(), np.array(self._undeleted, dtype=np.int64))

    def position(self) -> Position | None:
        """Return the state of the journal, None while deletions are pending."""
        return None if self._undeleted else self._journal.position()

    def read_checkpoint(self) -> Buffer | None:
        """Return the journal's checkpoint."""
        return self._journal.read_checkpoint()

    def checkpoint_room(self) -> int:
        """Return the journal's limit."""
        return self._journal.checkpoint_room()

    def write_checkpoint(self, content: Iterable[Buffer]) -> bool:
        """Write a checkpoint beside the journal."""
        return self._journal.write_checkpoint(content)

    def usage(self) -> Usage:
        """Return the bytes of the journal and those in the pool."""
        return replace(self._journal.usage(), pool_bytes=self._pool_bytes)

    def close(self) -> None:
        """Leave the pool and unlock the directory."""
        self._journaler.shutdown()
        self._pool.close()
        self._journal.close()

    def _settle(self, numbers: Sequence[int]) -> None:
        """Delete unacknowledged payloads, and entries whose payload the pool has lost."""
        unknown = range(self._next, self._next + _MAX_ENTRIES)
        self._pool.remove([self._key(number, self._opening - 1) for number in unknown])
        notes = self._noted(numbers)
        present = self._pool.present([key for key, _ in notes.values()])
        lost = [number for number, there in zip(notes, present, strict=True) if not there]
        self._pool_bytes = sum(nbytes for _, nbytes in notes.values())
        if lost:
            log.warning("the pool has lost %d of %d payloads", len(lost), len(notes))
            self.delete(lost)

    def _noted(self, numbers: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Return (key, bytes) of payloads, by entry."""
        with self._notes() as note:
            found = {number: note(number) for number in numbers}
            return {n: (kept.key, kept.nbytes) for n, kept in found.items() if kept is not None}

    @contextmanager
    def _notes(self) -> Iterator[Callable[[int], Note | None]]:
        with self._journal.reader() as read:

            def note(number: int) -> Note | None:
                held = read(number)
                if held is None or not _is_intact(number, held):
                    return None
                words = np.frombuffer(held.payload, dtype="<u8")
                return Note(self._key(number, int(words[0])), int(words[1]), words[2:])

            yield note

    def _removed(self, numbers: Sequence[int], keys: Sequence[str]) -> list[int]:
        try:
            gone = self._pool.remove(keys)
        except PoolUnreachable as error:
            log.warning("%d deleted entries stay in the pool for now: %s", len(numbers), error)
            return []
        return [number for number, removed in zip(numbers, gone, strict=True) if removed]

    def _key(self, number: int, opening: int) -> str:
        return f"bridge/{self._name}/{opening}/{number}"


def _journaled(number: int, opening: int, entry: Entry) -> Entry:
    """Return an entry with opening, length and checksums of its payload in the payload's place."""
    if entry.payload is None or not _nbytes(entry.payload):
        return Entry(entry.header, reserved=entry.reserved, frees_space=entry.frees_space)
    sums = row_checksums(number, entry.payload, entry.row_bytes)
    words = np.empty(2 + len(sums), dtype="<u8")
    words[0], words[1], words[2:] = opening, _nbytes(entry.payload), sums
    return Entry(entry.header, words.view(np.uint8).data)


def _is_intact(number: int, held: StoredPayload) -> bool:
    assert held.checksums is not None
    return len(held.checksums) == 1 and row_is_intact(
        number, 0, held.payload, int(held.checksums[0])
    )


def _nbytes(payload: Buffer) -> int:
    return memoryview(payload).nbytes
