"""A durable store with a cache: memory has the newest payloads, the durable store has all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bridge.errors import StoreFull
from bridge.store.base import WHOLE, Entry, Position, Reader, ReadPlan, Store, Usage
from bridge.store.payloads import Payloads, cost, room_of
from bridge.wire.envelope import Buffer


class CachedStore:
    """Entries are durable when `append` returns; the cache has at most ``memory_limit`` bytes."""

    def __init__(self, durable: Store, memory_limit: int) -> None:
        self.tier = f"memory and {durable.tier}"
        self._durable = durable
        self._limit = memory_limit
        self._index_bytes = 0
        self._recent = Payloads()

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Store all entries durably or raise StoreFull."""
        full = self._index_bytes > room_of(self._limit)
        if full and not all(entry.reserved for entry in entries):
            raise StoreFull(
                f"the index of the bridge's records takes {self._index_bytes} bytes, more than "
                "its memory limit; collect old steps (python -m bridge gc) or raise --memory-limit"
            )
        numbers = self._durable.append(entries)
        self._make_room(sum(cost(entry.payload) for entry in entries))
        for number, entry in zip(numbers, entries, strict=True):
            if entry.payload is not None and cost(entry.payload) <= self._room():
                self._recent.put(number, entry.payload)
        return numbers

    @contextmanager
    def reader(self, plan: ReadPlan = WHOLE) -> Iterator[Reader]:
        """Yield the payload lookup, which tries the cache first."""
        below = (run for run in plan.runs if self._recent.get(run[0]) is None)
        with self._durable.reader(replace(plan, runs=below)) as durable:
            yield lambda number: self._recent.get(number) or durable(number)

    def in_memory(self, numbers: Iterable[int]) -> list[memoryview] | None:
        """Return the payloads if the cache has all of them, else None."""
        return self._recent.views(numbers)

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete entries in both tiers."""
        self._durable.delete(numbers)
        for number in numbers:
            self._recent.pop(number)

    def reserve(self, index_bytes: int) -> None:
        """Reserve memory for the index; the cache shrinks as the index grows."""
        self._index_bytes = index_bytes
        self._make_room(0)

    def replay(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the durable entries."""
        return self._durable.replay(first)

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of the durable entries."""
        return self._durable.numbers()

    def position(self) -> Position | None:
        """Return the state of the durable journal."""
        return self._durable.position()

    def read_checkpoint(self) -> Buffer | None:
        """Return the durable store's checkpoint."""
        return self._durable.read_checkpoint()

    def checkpoint_room(self) -> int:
        """Return the limit of the durable store."""
        return self._durable.checkpoint_room()

    def write_checkpoint(self, content: Iterable[Buffer]) -> bool:
        """Write a checkpoint to the durable store."""
        return self._durable.write_checkpoint(content)

    def usage(self) -> Usage:
        """Return the bytes in use in both tiers."""
        return replace(
            self._durable.usage(), memory_bytes=self._recent.nbytes, memory_limit=self._limit
        )

    def close(self) -> None:
        """Clear the cache and close the durable store."""
        self._recent.clear()
        self._durable.close()

    def _room(self) -> int:
        return room_of(self._limit) - self._index_bytes - self._recent.nbytes

    def _make_room(self, needed: int) -> None:
        while len(self._recent) and self._room() < needed:
            self._recent.pop(self._recent.oldest())
