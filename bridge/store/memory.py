"""The memory tier: it has a strict limit and ends with the process.

With a disk for spilling, the store moves the oldest payloads there when memory is full. The disk is
scratch space: the index is in memory, so the spilled payloads end with the process, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from bridge.errors import StoreFull
from bridge.store.base import WHOLE, Entry, Position, Reader, ReadPlan, Usage
from bridge.store.disk.lmdb_store import DiskStore
from bridge.store.payloads import Payloads, cost, room_of
from bridge.wire.envelope import Buffer

_MAX_SPILLED = 32 << 20  # per transaction; LMDB has a second copy until the commit


class MemoryStore:
    """Payloads by entry number; headers are not stored, because the index has their content."""

    def __init__(self, limit_bytes: int, spill: DiskStore | None = None) -> None:
        self.tier = "memory" if spill is None else "memory and spill"
        self._limit = limit_bytes
        self._index_bytes = 0
        self._next = 0
        self._payloads = Payloads()
        self._row_bytes: dict[int, int] = {}
        self._spill = spill
        self._spill_bytes = min(_MAX_SPILLED, limit_bytes // 64)

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Store all entries or raise StoreFull."""
        if not all(entry.reserved for entry in entries):
            self._make_room(sum(cost(entry.payload) for entry in entries))
        numbers = list(range(self._next, self._next + len(entries)))
        self._next += len(entries)
        for number, entry in zip(numbers, entries, strict=True):
            if entry.payload is not None:
                self._payloads.put(number, entry.payload)
                self._row_bytes[number] = entry.row_bytes
        return numbers

    @contextmanager
    def reader(self, plan: ReadPlan = WHOLE) -> Iterator[Reader]:
        """Yield the payload lookup."""
        if self._spill is None:
            yield self._payloads.get
            return
        with self._spill.reader() as on_disk:
            yield lambda number: self._payloads.get(number) or on_disk(number)

    def in_memory(self, numbers: Iterable[int]) -> list[memoryview] | None:
        """Return the payloads if none of them is spilled, else None."""
        return self._payloads.views(numbers)

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete entries."""
        elsewhere = []
        for number in numbers:
            if self._payloads.pop(number):
                del self._row_bytes[number]
            else:
                elsewhere.append(number)
        if self._spill is not None:
            self._spill.delete(elsewhere)

    def reserve(self, index_bytes: int) -> None:
        """Reserve memory for the index."""
        self._index_bytes = index_bytes

    def replay(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield nothing, because a memory store starts empty."""
        yield from ()

    def numbers(self) -> NDArray[np.int64]:
        """Return an empty array, because a memory store starts empty."""
        return np.empty(0, np.int64)

    def position(self) -> Position | None:
        """Return None, because a memory store has no journal."""
        return None

    def read_checkpoint(self) -> Buffer | None:
        """Return None, because a memory store has no checkpoint."""
        return None

    def checkpoint_room(self) -> int:
        """Return 0, because a memory store has no checkpoint."""
        return 0

    def write_checkpoint(self, content: Iterable[Buffer]) -> bool:
        """Return False, because a memory store has no checkpoint."""
        return False

    def usage(self) -> Usage:
        """Return the bytes in memory and the spilled bytes."""
        disk = Usage() if self._spill is None else self._spill.usage()
        return Usage(self._payloads.nbytes, self._limit, disk.disk_bytes, disk.disk_limit)

    def close(self) -> None:
        """Free all payloads."""
        self._payloads.clear()
        if self._spill is not None:
            self._spill.close()

    def _make_room(self, needed: int) -> None:
        room = room_of(self._limit) - self._index_bytes
        if self._spill is not None and needed <= room:
            over = self._payloads.nbytes + needed - room
            if over > 0:
                self._spill_oldest(self._spill, over)
        if self._payloads.nbytes + needed > room:
            raise StoreFull(
                f"the bridge's memory is full ({self._payloads.nbytes} bytes of records and "
                f"{self._index_bytes} of their index, {needed} more requested, limit "
                f"{self._limit}); collect old steps (python -m bridge gc), raise --memory-limit "
                "or serve with --dir"
            )

    def _spill_oldest(self, disk: DiskStore, minimum: int) -> None:
        """Move at least ``minimum`` bytes of the oldest payloads to disk; StoreFull moves none."""
        batch = self._oldest(max(minimum, self._spill_bytes))
        try:
            disk.write(batch)
        except StoreFull:
            batch = self._oldest(minimum)
            disk.write(batch)
        for number, _ in batch:
            self._payloads.pop(number)
            del self._row_bytes[number]

    def _oldest(self, nbytes: int) -> list[tuple[int, Entry]]:
        batch: list[tuple[int, Entry]] = []
        for number, held in self._payloads.items():
            batch.append((number, Entry(b"", held.payload, self._row_bytes[number])))
            nbytes -= cost(held.payload)
            if nbytes <= 0:
                break
        return batch
