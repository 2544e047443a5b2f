"""The interface of a store: append entries, read payloads, delete entries, replay headers.

An entry is one accepted message: a small header, from which a start rebuilds the index, and the
record bytes of a Rows message. The store numbers entries in the order of `Store.append` and never
reuses a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bridge.wire.envelope import Buffer


@dataclass(frozen=True, slots=True)
class Entry:
    """``header`` is a packed message without record bytes, ``payload`` rows of ``row_bytes``.

    ``row_bytes`` 0 means that the payload is one row. A ``reserved`` entry is small and may use the
    reserved space of a full store. An entry that ``frees_space``, an RL step, may use more of it.
    """

    header: bytes
    payload: Buffer | None = None
    row_bytes: int = 0
    reserved: bool = False
    frees_space: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return len(self.header) + (0 if self.payload is None else memoryview(self.payload).nbytes)


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A payload as a store returns it.

    ``checksums`` has the row checksums (`bridge.store.checksums`) of a tier whose bytes other
    programs can change; None in memory of this process. Payload and checksums begin at
    ``first_row`` of the entry, which is 0 unless the read plan names only some rows.
    """

    payload: memoryview
    checksums: NDArray[np.uint64] | None = None
    first_row: int = 0


# Consecutive rows of an entry: (entry, first row, index of the first row in the reply, rows).
Run = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The rows that the caller will read, in order; a remote tier fetches them in few requests."""

    row_bytes: int
    runs: Iterable[Run]


WHOLE = ReadPlan(0, ())
Reader = Callable[[int], StoredPayload | None]


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes in use and limits by tier; a limit of 0 means that the store has no such tier.

    ``pool_bytes`` are in the memory of the pool's processes, which have their own limit.
    """

    memory_bytes: int = 0
    memory_limit: int = 0
    disk_bytes: int = 0
    disk_limit: int = 0
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """State of a journal: the number of its next entry, and the count of deletions."""

    next: int
    deletions: int


class Store(Protocol):
    """A journal of entries with a size limit; only one thread may use it."""

    tier: str

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Store all entries, as durably as the tier promises, and return their numbers.

        Raises:
            StoreFull: the store has none of these entries, and still has all earlier ones.
        """

    def reader(self, plan: ReadPlan = WHOLE) -> AbstractContextManager[Reader]:
        """Yield a function from entry number to payload; buffers are valid inside the context.

        A payload has at least the planned rows of its entry, and all rows without a plan.
        """

    def in_memory(self, numbers: Iterable[int]) -> list[memoryview] | None:
        """Return the payloads if all of them are in memory of this process, else None."""

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete entries and reuse their space; ignore unknown numbers."""

    def reserve(self, index_bytes: int) -> None:
        """Reserve ``index_bytes`` of the memory limit for the daemon's index."""

    def replay(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (number, header) of every entry from number ``first`` on, oldest first."""

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of all entries, int64 [n], ascending."""

    def position(self) -> Position | None:
        """Return the state of the journal.

        None if the journal does not outlive the process, or while deletions are pending.
        """

    def read_checkpoint(self) -> Buffer | None:
        """Return the newest checkpoint, None if there is none."""

    def checkpoint_room(self) -> int:
        """Return the maximum bytes of a checkpoint."""

    def write_checkpoint(self, content: Iterable[Buffer]) -> bool:
        """Replace the checkpoint; return False without space. Any thread may call it."""

    def usage(self) -> Usage:
        """Return the bytes in use."""

    def close(self) -> None:
        """Release files and memory."""
