"""An engine's rows on their way to a bridge of the same machine: put into memory that it reads.

`bridge.transport.shared_memory` says how. A message keeps its place until it is answered, so that
it can be sent again, also by itself. Messages differ in size, so several share a slab, one behind
the other; it is used again when all of them are answered.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from bridge.transport.shared_memory import STAMP_BYTES, Region, stamp
from bridge.wire import LentRows, Place, Rows
from bridge.wire.fields import wire_bytes
from bridge.wire.place import MAX_REGION_BYTES

# A smaller message costs its own handling and not its bytes.
_LEAST_BYTES = 256 << 10
_SLAB_MESSAGES = 4  # of the largest; the more, the less of a slab stays empty at its end
_SPARE_SLABS = 2  # a slab waits for the last of its messages, the window does not


@dataclass(slots=True)
class _Slab:
    """Room for messages one behind the other: those put there since it was empty."""

    room: Place
    used: int = 0
    waiting: int = 0
    places: list[Place] = field(default_factory=list)

    def place(self, nbytes: int) -> Place | None:
        """Return the next place of so many bytes, None if the slab has not so much left."""
        if self.used + STAMP_BYTES + nbytes > STAMP_BYTES + self.room.nbytes:
            return None
        place = replace(self.room, offset=self.room.offset + self.used, nbytes=nbytes)
        self.used += -(-(STAMP_BYTES + nbytes) // STAMP_BYTES) * STAMP_BYTES
        self.waiting += 1
        self.places.append(place)
        return place


class Placing:
    """Places for messages of at most ``message_bytes``, about ``window_bytes`` of them."""

    def __init__(self, window_bytes: int, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._slab_bytes = _SLAB_MESSAGES * (message_bytes + STAMP_BYTES) - STAMP_BYTES
        # The region has a page of its own.
        most = (MAX_REGION_BYTES - self._slab_bytes) // (self._slab_bytes + STAMP_BYTES)
        self._slabs = min(window_bytes // self._slab_bytes + _SPARE_SLABS, most)
        self._region: Region | None = None
        self._open: _Slab | None = None
        self._free: list[_Slab] = []
        self._slab_of: dict[int, _Slab] = {}

    def put(self, rows: Rows) -> LentRows | None:
        """Copy the payload of a large message to a place; None if it has to travel itself."""
        payload = wire_bytes(rows.payload, np.uint8)
        if not self._slabs or not _LEAST_BYTES <= payload.nbytes <= self._message_bytes:
            return None
        if self._region is None:
            self._region = self._new_region()
        place = None if self._region is None else self._next_place(payload.nbytes)
        if place is None or self._region is None:
            return None
        memory = self._region.memory(place)
        stamped = stamp(memory)
        memory[STAMP_BYTES : STAMP_BYTES + payload.nbytes] = payload
        return LentRows(rows.block, place, stamped)

    def taken_back(self, lent: LentRows) -> Rows:
        """Return the message itself, and use its place again."""
        assert self._region is not None
        rows = self._region.memory(lent.place)[STAMP_BYTES:]
        payload = np.frombuffer(bytes(rows[: lent.nbytes]), np.uint8).reshape(
            -1, lent.block.row_bytes
        )
        self.take_back(lent)
        return Rows(lent.block, payload)

    def take_back(self, lent: LentRows) -> None:
        """Use the place of a message again that is answered, once all of its slab are."""
        slab = self._slab_of.pop(lent.place.offset)
        slab.waiting -= 1
        if not slab.waiting:
            self._empty(slab)
            if slab is not self._open:
                self._free.append(slab)

    def stop(self) -> None:
        """Lend no more places."""
        self._slabs = 0

    def close(self) -> None:
        """Let go of the memory."""
        if self._region is not None:
            self._region.close()

    def _next_place(self, nbytes: int) -> Place | None:
        """Return a place that nothing else uses, if there is one."""
        place = None if self._open is None else self._open.place(nbytes)
        if place is None and self._free:
            # The slab that was freed last is that of which the caches know most.
            self._open = self._free.pop()
            place = self._open.place(nbytes)
        if place is not None and self._open is not None:
            self._slab_of[place.offset] = self._open
        return place

    def _empty(self, slab: _Slab) -> None:
        """Have a slab begin anew.

        Whoever reads one of its old places late must not find the stamp there, wherever the next
        messages begin; so every one gets another stamp before anything is written.
        """
        assert self._region is not None
        for place in slab.places:
            stamp(self._region.memory(place))
        slab.places.clear()
        slab.used = 0

    def _new_region(self) -> Region | None:
        with suppress(OSError):
            region = Region(self._slabs, self._slab_bytes)
            while (room := region.borrow()) is not None:
                self._free.append(_Slab(room))
            return region
        self.stop()
        return None
