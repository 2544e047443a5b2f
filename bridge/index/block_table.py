"""What is known of every block of rows: whose it is, with which weights it was computed, when.

A block is the store's entry of one Rows message; blocks are named by the number of their entry.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = np.dtype(
    [("engine", "<i4"), ("part", "i1"), ("version", "<i4"), ("step", "<i4"), ("row_bytes", "<i4")]
)

_NONE = np.array((-1, -1, -1, -1, 0), dtype=BLOCK)
_LEAST_ROOM = 1024


class BlockTable:
    """A window of entry numbers, 17 bytes each; numbers that are no blocks have engine -1."""

    def __init__(self) -> None:
        self._first = 0
        self._end = 0
        self._window = np.full(_LEAST_ROOM, _NONE)

    def put(
        self, number: int, engine: int, part: int, version: int, step: int, row_bytes: int
    ) -> None:
        """Note a block; numbers ascend."""
        if number - self._first >= len(self._window):
            self._make_room(number)
        self._window[number - self._first] = (engine, part, version, step, row_bytes)
        self._end = number + 1

    def versions(self, blocks_N: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the weight version of each block; -1 stays -1."""
        found = self._window["version"][np.maximum(blocks_N - self._first, 0)]
        return np.where(blocks_N < 0, np.int32(-1), found)

    def row_bytes(self, blocks_N: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the bytes of a row of each block; 0 for -1."""
        found: NDArray[np.int32] = self._window["row_bytes"][np.maximum(blocks_N - self._first, 0)]
        return np.where(blocks_N < 0, np.int32(0), found)

    def held(self) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """Return (numbers [B], BLOCK [B]) of all blocks, ascending."""
        window = self._window[: max(0, self._end - self._first)]
        at = np.flatnonzero(window["engine"] >= 0)
        return at + self._first, window[at]

    def drop(self, numbers: NDArray[np.int64]) -> None:
        """Forget blocks."""
        self._window[numbers - self._first] = _NONE

    def nbytes(self) -> int:
        """Return the memory that the table takes."""
        return self._window.nbytes

    def _make_room(self, number: int) -> None:
        """Move the window behind what was dropped from its front; double it if that is too little.

        At most half of a new window is in use, so that a put costs the same however many there are.
        """
        numbers, blocks = self.held()
        first = int(numbers[0]) if len(numbers) else number
        room = max(_LEAST_ROOM, 2 * (number + 1 - first))
        window = np.full(room, _NONE)
        window[numbers - first] = blocks
        self._first, self._window = first, window
