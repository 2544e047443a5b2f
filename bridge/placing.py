"""An engine's rows on their way to a bridge of the same machine: put into memory that it reads.

`bridge.region` says how. A message keeps its place until it is answered, so that it can be sent
again, also by itself.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from bridge.region import STAMP_BYTES, Region, stamp
from bridge.wire import LentRows, Rows
from bridge.wire.fields import wire_bytes
from bridge.wire.place import MAX_REGION_BYTES

# A smaller message costs its own handling and not its bytes.
_LEAST_BYTES = 256 << 10


class Placing:
    """Places of ``place_bytes`` for messages, of ``window_bytes`` in all."""

    def __init__(self, window_bytes: int, place_bytes: int) -> None:
        # One less than would fit: the region has a page of its own.
        self._places = min(window_bytes, MAX_REGION_BYTES - place_bytes) // place_bytes
        self._place_bytes = place_bytes
        self._region: Region | None = None

    def put(self, rows: Rows) -> LentRows | None:
        """Copy the payload of a large message to a place; None if it has to travel itself."""
        payload = wire_bytes(rows.payload, np.uint8)
        if not self._places or not _LEAST_BYTES <= payload.nbytes <= self._place_bytes:
            return None
        if self._region is None:
            self._region = self._new_region()
        place = None if self._region is None else self._region.borrow()
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
        """Use the place of a message again that is answered."""
        assert self._region is not None
        self._region.give_back(lent.place)

    def stop(self) -> None:
        """Lend no more places."""
        self._places = 0

    def close(self) -> None:
        """Let go of the memory."""
        if self._region is not None:
            self._region.close()

    def _new_region(self) -> Region | None:
        with suppress(OSError):
            return Region(self._places, self._place_bytes)
        self.stop()
        return None
