"""Writes rows to a client's shared memory instead of the socket."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridge.daemon.fetch.gather import Chunk
from bridge.layout import Part
from bridge.transport.shared_memory import STAMP_BYTES, stamp
from bridge.wire import PageRows, ShmPageRows
from bridge.wire.fields import wire_bytes


class ShmWriter:
    """Writes the rows of one page to a buffer, one chunk after the other."""

    def __init__(self, memory: memoryview) -> None:
        self._stamp = stamp(memory)
        self._rows = memory[STAMP_BYTES:]
        self._at = 0

    @property
    def nbytes(self) -> int:
        """Bytes of rows that fit into the buffer."""
        return len(self._rows)

    def put(self, part: Part, chunk: Chunk) -> ShmPageRows:
        """Write the rows of a chunk; return the message that describes them."""
        nbytes = chunk.copy_to(self._rows[self._at :])
        return self._described(part, chunk.begin, chunk.valid, chunk.selected, nbytes)

    def take(self, rows: PageRows) -> ShmPageRows:
        """Write rows that are already joined; return the message that describes them."""
        nbytes = rows.nbytes
        self._rows[self._at : self._at + nbytes] = wire_bytes(rows.rows, np.uint8)
        return self._described(rows.part, rows.begin, rows.valid, rows.rows.shape[1], nbytes)

    def _described(
        self, part: Part, begin: int, valid: NDArray[np.bool_], row_bytes: int, nbytes: int
    ) -> ShmPageRows:
        at, self._at = self._at, self._at + nbytes
        return ShmPageRows(part, begin, valid, row_bytes, at, self._stamp)
