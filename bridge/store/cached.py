"""The durable store: every entry goes to disk, and memory keeps the newest payloads for reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bridge.errors import StoreFull
from bridge.store.base import Entry, Fill, Reader
from bridge.store.disk import DiskStore
from bridge.store.payloads import Payloads, cost, room_of


class CachedStore:
    """What is appended is on disk when `append` returns; memory holds ``memory_limit`` at most."""

    def __init__(self, disk: DiskStore, memory_limit: int) -> None:
        self.tier = "memory and disk"
        self._disk = disk
        self._limit = memory_limit
        self._index_bytes = 0
        self._recent = Payloads()

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Write all entries in one synced transaction or raise StoreFull."""
        full = self._index_bytes > room_of(self._limit)
        if full and not all(entry.vital for entry in entries):
            raise StoreFull(
                f"the index of the bridge's records takes {self._index_bytes} bytes, more than "
                "its memory limit; collect old steps (python -m bridge gc) or raise --memory-limit"
            )
        numbers = self._disk.append(entries)
        self._make_room(sum(cost(entry.payload) for entry in entries))
        for number, entry in zip(numbers, entries, strict=True):
            if entry.payload is not None and cost(entry.payload) <= self._room():
                self._recent.put(number, entry.payload)
        return numbers

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Give the payload lookup: memory first."""
        with self._disk.reader() as on_disk:
            yield lambda number: self._recent.get(number) or on_disk(number)

    def drop(self, numbers: Sequence[int]) -> None:
        """Give up entries in both tiers."""
        self._disk.drop(numbers)
        for number in numbers:
            self._recent.pop(number)

    def reserve(self, index_bytes: int) -> None:
        """Leave room for the index; the cache shrinks as it grows."""
        self._index_bytes = index_bytes
        self._make_room(0)

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """Yield the entries on disk."""
        return self._disk.replay()

    def fill(self) -> Fill:
        """Return what both tiers hold."""
        disk = self._disk.fill()
        return Fill(self._recent.nbytes, self._limit, disk.disk_bytes, disk.disk_limit)

    def close(self) -> None:
        """Close the disk and drop the cache."""
        self._recent.clear()
        self._disk.close()

    def _room(self) -> int:
        return room_of(self._limit) - self._index_bytes - self._recent.nbytes

    def _make_room(self, needed: int) -> None:
        while len(self._recent) and self._room() < needed:
            self._recent.pop(self._recent.oldest())
