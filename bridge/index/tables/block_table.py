"""Engine, part, weight version, RL step and row size of every block of rows.

A block is the store entry of one Rows message; its number is the number of the entry.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.index.tables.saved import Saved, Snapshot, UnusableCheckpoint

BLOCK = np.dtype(
    [("engine", "<i4"), ("part", "i1"), ("version", "<i4"), ("step", "<i4"), ("row_bytes", "<i4")]
)

_FIELDS = BLOCK.names or ()
_MIN_ROOM = 1024
_DELETED = -1


class BlockTable:
    """The stored blocks by ascending number, 25 bytes each; at most half are deleted ones.

    Gaps between numbers take no memory.
    """

    def __init__(self) -> None:
        self._numbers: NDArray[np.int64] = np.empty(_MIN_ROOM, dtype=np.int64)
        self._blocks: NDArray[np.void] = np.empty(_MIN_ROOM, dtype=BLOCK)
        self._end = 0
        self._deleted = 0

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: numbers of the stored blocks, and the fields of BLOCK."""
        numbers, blocks = self.held()
        return {"numbers": numbers.copy()} | {name: blocks[name].copy() for name in _FIELDS}

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Return the table of a snapshot; the next `put` makes room for more."""
        made = cls()
        made._numbers = saved.array("numbers", np.int64).copy()
        made._end = len(made._numbers)
        made._blocks = np.empty(made._end, dtype=BLOCK)
        for name in _FIELDS:
            column = saved.array(name, BLOCK[name].type)
            if len(column) != made._end:
                raise UnusableCheckpoint(f"{name} has another length than the blocks")
            made._blocks[name] = column
        return made

    def put(
        self, number: int, engine: int, part: int, version: int, step: int, row_bytes: int
    ) -> None:
        """Add a block; the caller passes ascending numbers."""
        if self._end == len(self._numbers):
            self._resize()
        self._numbers[self._end] = number
        self._blocks[self._end] = (engine, part, version, step, row_bytes)
        self._end += 1

    def versions(self, blocks_N: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the weight version of each block; -1 stays -1."""
        return self._column("version", blocks_N, -1)

    def row_bytes(self, blocks_N: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the bytes of a row of each block; 0 for -1."""
        return self._column("row_bytes", blocks_N, 0)

    def held(self) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """Return (numbers [B], BLOCK [B]) of all blocks, ascending."""
        numbers, blocks = self._numbers[: self._end], self._blocks[: self._end]
        if not self._deleted:
            return numbers, blocks
        kept = blocks["engine"] != _DELETED
        return numbers[kept], blocks[kept]

    def delete(self, numbers: NDArray[np.int64]) -> None:
        """Delete stored blocks."""
        self._blocks["engine"][self._indices(numbers)] = _DELETED
        self._deleted += len(numbers)
        if self._deleted > self._end // 2:
            self._resize()

    def nbytes(self) -> int:
        """Return the memory that the table takes."""
        return self._numbers.nbytes + self._blocks.nbytes

    def _column(self, name: str, blocks_N: NDArray[np.int64], none: int) -> NDArray[np.int32]:
        if self._end == 0:
            return np.full(blocks_N.shape, none, dtype=np.int32)
        found: NDArray[np.int32] = self._blocks[name][self._indices(blocks_N)]
        return np.where(blocks_N < 0, np.int32(none), found)

    def _indices(self, numbers: NDArray[np.int64]) -> NDArray[np.intp]:
        indices: NDArray[np.intp] = self._numbers[: self._end].searchsorted(numbers)
        return indices

    def _resize(self) -> None:
        """Remove deleted blocks, and make room for twice the remaining ones."""
        numbers, blocks = self.held()
        room = max(_MIN_ROOM, 2 * len(numbers))
        self._numbers, self._blocks = np.empty(room, dtype=np.int64), np.empty(room, dtype=BLOCK)
        self._numbers[: len(numbers)], self._blocks[: len(numbers)] = numbers, blocks
        self._end, self._deleted = len(numbers), 0
