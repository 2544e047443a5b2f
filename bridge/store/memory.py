"""The memory tier: gone with the process, never over its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bridge.errors import StoreFull
from bridge.store.base import Entry, Reader
from bridge.wire.envelope import Buffer

_SMALL_FRAME = 32 << 10


class MemoryStore:
    """Payloads by entry number; the headers are in the index already and only counted here."""

    tier = "memory"
    may_rot = False

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._entries = 0
        self._payloads: dict[int, Buffer] = {}

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Hold all entries or raise StoreFull."""
        needed = sum(entry.nbytes for entry in entries)
        if self._used + needed > self._limit:
            raise StoreFull(
                f"the bridge's memory store is full ({self._used} of {self._limit} bytes held, "
                f"{needed} more asked for); raise --memory-limit or serve with --dir"
            )
        self._used += needed
        return [self._hold(entry) for entry in entries]

    def _hold(self, entry: Entry) -> int:
        number = self._entries
        self._entries += 1
        if entry.payload is not None:
            self._payloads[number] = _owned(entry.payload)
        return number

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Give the payload lookup."""
        yield self._payloads.get

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """Yield nothing: a memory store starts empty."""
        yield from ()

    def used_bytes(self) -> int:
        """Return the bytes held."""
        return self._used

    def limit_bytes(self) -> int:
        """Return the limit."""
        return self._limit

    def close(self) -> None:
        """Drop everything."""
        self._payloads.clear()


def _owned(payload: Buffer) -> Buffer:
    """Copy a small frame, which would otherwise keep the socket's whole receive buffer alive."""
    return bytes(payload) if memoryview(payload).nbytes < _SMALL_FRAME else payload
