"""Which answer a client has lent which place of its memory (`bridge.transport.shared_memory`)."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from bridge.errors import CorruptMessage
from bridge.transport.shared_memory import STAMP_BYTES, Region, stamped
from bridge.wire import PageRows, Place, PlacedRows

_NOT_LENT = "rows arrived for memory that was not lent to them; fetch again"


class Lender:
    """The places of one connection; a new connection has a new lender.

    A bridge may still write to the place of an answer that nobody waits for any more. Such a place
    is not lent again: once nothing else is lent either, there is new memory.
    """

    def __init__(self) -> None:
        self._region: Region | None = None
        self._lent: dict[int, Place] = {}
        self._is_abandoned = False
        self._refused = False

    def lend(self, seq: int) -> Place | None:
        """Return a place for the answer ``seq``, None if it has to come through the socket."""
        if self._refused:
            return None
        if self._is_abandoned and not self._lent:
            self.close()
        if self._region is None:
            self._region = self._new_region()
        place = None if self._region is None else self._region.borrow()
        if place is not None:
            self._lent[seq] = place
        return place

    def rows(self, seq: int, placed: PlacedRows) -> PageRows:
        """Return rows as they stand in the place of answer ``seq``; copy them, then `check`.

        Raises:
            CorruptMessage: they cannot stand there.
        """
        view = self._view(seq, placed)
        rows_VW = np.frombuffer(view, dtype=np.uint8).reshape(-1, placed.row_bytes)
        return PageRows(placed.part, placed.begin, placed.valid, rows_VW)

    def check(self, seq: int, placed: PlacedRows) -> None:
        """Raise CorruptMessage unless nothing has been written over the rows of `rows` since."""
        if stamped(self._memory(seq)) != placed.stamp:
            raise CorruptMessage(
                "rows in shared memory have another stamp: the bridge wrote there again, as if it "
                "had been asked twice; fetch again"
            )

    def take_back(self, seq: int) -> None:
        """Lend the place of an answer again that has come to its end."""
        place = self._lent.pop(seq, None)
        if place is not None and self._region is not None:
            self._region.give_back(place)

    def abandon(self, seq: int) -> None:
        """Leave the place to an answer that nobody waits for any more."""
        if self._lent.pop(seq, None) is not None:
            self._is_abandoned = True

    def close(self) -> None:
        """Let go of the memory."""
        self._lent.clear()
        self._is_abandoned = False
        if self._region is not None:
            self._region.close()
            self._region = None

    def _new_region(self) -> Region | None:
        with suppress(OSError, AttributeError):  # no memfd_create
            return Region()
        self._refused = True
        return None

    def _view(self, seq: int, placed: PlacedRows) -> memoryview:
        rows = self._memory(seq)[STAMP_BYTES:]
        if placed.at + placed.nbytes > len(rows):
            raise CorruptMessage(_NOT_LENT)
        return rows[placed.at : placed.at + placed.nbytes]

    def _memory(self, seq: int) -> memoryview:
        place = self._lent.get(seq)
        if place is None or self._region is None:
            raise CorruptMessage(_NOT_LENT)
        return self._region.memory(place)
