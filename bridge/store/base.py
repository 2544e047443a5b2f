"""What the daemon asks of a store: append entries, read one payload, drop entries, replay.

An entry is one accepted message: a small header that rebuilds the index, and the record bytes of a
Rows message. Entries are numbered in the order in which they were appended; numbers are not used
again.
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

    A payload of another kind is one row: ``row_bytes`` 0. A ``reserved`` entry is small and may use
    what a full store keeps back; one that ``frees_space``, a step, may use more of it.
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
    """A payload as a tier holds it.

    ``sums`` are the row checksums (`bridge.store.checksums`) where bytes can change behind the
    daemon's back; None where only this process can reach them. Both begin at ``first_row`` of the
    entry, which is 0 unless only some rows were wanted.
    """

    payload: memoryview
    checksums: NDArray[np.uint64] | None = None
    first_row: int = 0


# Rows of an entry that follow each other: (entry, first row, first row of the answer, rows).
Run = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What will be read, in order, so that a tier far away can fetch it in few requests."""

    row_bytes: int
    runs: Iterable[Run]


WHOLE = ReadPlan(0, ())
Reader = Callable[[int], StoredPayload | None]


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes in use and their limits by tier; a limit of 0 is a tier that is not there.

    ``pool_bytes`` lie in memory of other processes, which bound it themselves.
    """

    memory_bytes: int = 0
    memory_limit: int = 0
    disk_bytes: int = 0
    disk_limit: int = 0
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """Where a journal stands: the number of its next entry, and how often entries were deleted."""

    next: int
    deletions: int


class Store(Protocol):
    """A bounded journal of entries; one thread uses it."""

    tier: str

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Hold all entries, as durably as the tier promises, and return their numbers.

        Raises:
            StoreFull: none of the entries is held; everything held before still is.
        """

    def reader(self, plan: ReadPlan = WHOLE) -> AbstractContextManager[Reader]:
        """Give a function from entry number to payload; its buffers live as long as the context.

        A payload holds the wanted rows of its entry at least, and all rows if none are wanted.
        """

    def in_memory(self, numbers: Iterable[int]) -> list[memoryview] | None:
        """Return the payloads of these entries if only this process can reach them all, or None."""

    def delete(self, numbers: Sequence[int]) -> None:
        """Give up entries; their space is used again. Unknown numbers are passed over."""

    def reserve(self, index_bytes: int) -> None:
        """Leave so much of the memory limit to the daemon's index, which grows with the rows."""

    def replay(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (number, header) of every entry held from number ``first`` on, oldest first."""

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of all entries held, ascending."""

    def position(self) -> Position | None:
        """Return where the journal stands, None if it does not outlive the process.

        Or if entries that were dropped are still there.
        """

    def read_checkpoint(self) -> Buffer | None:
        """Return the checkpoint that was written last, None if there is none."""

    def checkpoint_room(self) -> int:
        """Return how long a checkpoint may be."""

    def write_checkpoint(self, content: Iterable[Buffer]) -> bool:
        """Keep a checkpoint instead of the last one if there is room; any thread may call it."""

    def usage(self) -> Usage:
        """Return what is in use."""

    def close(self) -> None:
        """Release files and memory."""
