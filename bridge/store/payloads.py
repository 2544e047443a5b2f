"""Payloads in memory, by entry number, oldest first."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable

from bridge.store.base import StoredPayload
from bridge.wire.envelope import Buffer

_SMALL_FRAME = 32 << 10
_MAX_IN_TRANSIT = 192 << 20
_OBJECT_BYTES = 1 << 10  # frame, view and dict item


class Payloads:
    """Received frames, mostly without a copy; ``nbytes`` is their approximate memory."""

    def __init__(self) -> None:
        self._held: dict[int, StoredPayload] = {}
        self._views: dict[int, memoryview] = {}  # the same payloads, for the lookup per row
        self.get = self._held.get
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, number: int, payload: Buffer) -> None:
        """Add a payload under a new number."""
        held = self._held[number] = StoredPayload(memoryview(_owned(payload)))
        self._views[number] = held.payload
        self.nbytes += cost(payload)

    def views(self, numbers: Iterable[int]) -> list[memoryview] | None:
        """Return the payloads, None if one of the numbers is unknown."""
        try:
            return list(map(self._views.__getitem__, numbers))
        except KeyError:
            return None

    def oldest(self) -> int:
        """Return the number of the oldest payload."""
        return next(iter(self._held))

    def items(self) -> ItemsView[int, StoredPayload]:
        """Return (number, payload) pairs, oldest first."""
        return self._held.items()

    def pop(self, number: int) -> bool:
        """Remove a payload; return False if the number is unknown."""
        held = self._held.pop(number, None)
        if held is None:
            return False
        del self._views[number]
        self.nbytes -= cost(held.payload)
        return True

    def clear(self) -> None:
        """Remove all payloads."""
        self._held.clear()
        self._views.clear()
        self.nbytes = 0


def room_of(limit_bytes: int) -> int:
    """Return the bytes of a memory limit that records and index may take.

    The rest is for data in flight: received messages that are not stored yet, a batch that LMDB
    writes, and pages that clients have not read yet.
    """
    return limit_bytes - min(limit_bytes // 8, _MAX_IN_TRANSIT)


def cost(payload: Buffer | None) -> int:
    """Return the approximate memory of a payload in bytes."""
    return 0 if payload is None else memoryview(payload).nbytes + _OBJECT_BYTES


def _owned(payload: Buffer) -> Buffer:
    """Copy a small frame, because it keeps the socket's whole receive buffer alive."""
    return bytes(payload) if memoryview(payload).nbytes < _SMALL_FRAME else payload
