"""What the daemon asks of a store: append entries durably, read one payload, replay the journal.

An entry is one accepted message: a small header that rebuilds the index, and the record bytes of a
Rows message. Entries are numbered from 0 in the order in which they were appended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from bridge.wire.envelope import Buffer

Reader = Callable[[int], Buffer | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """``header`` is a packed message without record bytes, ``payload`` the record bytes if any."""

    header: bytes
    payload: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that count against a store's limit."""
        return len(self.header) + (0 if self.payload is None else memoryview(self.payload).nbytes)


class Store(Protocol):
    """A bounded, append-only journal of entries."""

    tier: str
    may_rot: bool
    """Whether bytes can change behind the daemon's back, so that every read must be checked."""

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Hold all entries, as durably as the tier promises, and return their numbers.

        Raises:
            StoreFull: none of the entries is held; everything held before still is.
        """

    def reader(self) -> AbstractContextManager[Reader]:
        """Give a function from entry number to payload; its buffers live as long as the context."""

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, header) of every entry held, oldest first."""

    def used_bytes(self) -> int:
        """Return the bytes that count against the limit."""

    def limit_bytes(self) -> int:
        """Return the limit."""

    def close(self) -> None:
        """Release files and memory."""
