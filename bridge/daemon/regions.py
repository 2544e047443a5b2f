"""Memory of clients on this machine that the daemon reads and writes (`bridge.region`)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from bridge.daemon.gather import Piece
from bridge.errors import CorruptMessage, RegionOutOfReach
from bridge.layout import Part
from bridge.region import opened
from bridge.summed_copy import summed_copy
from bridge.wire import LentRows, PageRows, Place, PlacedRows, Rows
from bridge.wire.fields import wire_bytes

_MOST_OPEN = 64
_IDLE_S = 30.0


@dataclass(slots=True)
class _Open:
    """A client's region; None: it is out of reach, which is not tried with every question."""

    memory: memoryview | None
    key: str
    used_at: float


class Regions:
    """Keeps the regions of clients that ask again and again, one a client."""

    def __init__(self) -> None:
        self._open: dict[bytes, _Open] = {}

    def landing(self, peer: bytes, place: Place | None) -> Landing | None:
        """Return the place that a client lends for an answer, None if there is none in reach."""
        memory = None if place is None else self._memory(peer, place)
        return None if memory is None else Landing(memory)

    def rows(self, peer: bytes, lent: LentRows) -> Rows:
        """Copy the rows that an engine has put into its memory.

        Raises:
            RegionOutOfReach: this process cannot read that memory.
            CorruptMessage: it holds other bytes by now.
        """
        memory = self._memory(peer, lent.place)
        if memory is None:
            raise RegionOutOfReach(
                "the bridge cannot read the engine's memory; send the rows through the socket"
            )
        rows_nR = np.empty((len(lent.block.rows), lent.block.row_bytes), dtype=np.uint8)
        if summed_copy(rows_nR.reshape(-1).data, memory[: lent.nbytes]) != lent.sum:
            raise CorruptMessage("rows in shared memory fail their checksum; send them again")
        return Rows(lent.block, rows_nR)

    def _memory(self, peer: bytes, place: Place) -> memoryview | None:
        held = self._open.pop(peer, None)
        if held is None or held.key != place.key:
            held = _Open(opened(place), place.key, 0.0)
        held.used_at = time.monotonic()
        self._open[peer] = held  # the last of them
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        if held.memory is None or place.offset + place.nbytes > len(held.memory):
            return None
        return held.memory[place.offset : place.offset + place.nbytes]

    def look(self) -> None:
        """Let go of regions that are not used, whose clients may be gone."""
        before = time.monotonic() - _IDLE_S
        for peer in [peer for peer, held in self._open.items() if held.used_at < before]:
            del self._open[peer]


class Landing:
    """A place for the rows of one page, one piece after the other."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    @property
    def nbytes(self) -> int:
        """How many bytes of rows fit."""
        return len(self._memory)

    def put(self, part: Part, piece: Piece) -> PlacedRows:
        """Write the rows of a piece; return what tells the client of them."""
        landed = self._memory[self._at : self._at + piece.nbytes]
        piece.copy_to(landed)
        return self._told(part, piece.begin, piece.valid, piece.selected, landed)

    def take(self, rows: PageRows) -> PlacedRows:
        """Write rows that are joined already."""
        landed = self._memory[self._at : self._at + rows.nbytes]
        landed[:] = wire_bytes(rows.rows, np.uint8)
        return self._told(rows.part, rows.begin, rows.valid, rows.rows.shape[1], landed)

    def _told(
        self,
        part: Part,
        begin: int,
        valid: NDArray[np.bool_],
        row_bytes: int,
        landed: memoryview,
    ) -> PlacedRows:
        at, self._at = self._at, self._at + len(landed)
        return PlacedRows(part, begin, valid, row_bytes, at, xxh3_64_intdigest(landed))
