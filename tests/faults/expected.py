"""What an engine of the fault table records: a function of its name and the row alone.

Shape legend: n = rows, R = bytes of a row, T = positions.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge.layout import ModelShape, Part, RecordLayout, Site

LAYOUT = RecordLayout(
    ModelShape(4, 4096, 256, 16, 4, 4, 128, (0, 1, 2, 3), (0, 1, 2, 3)),
    (2, 3),
    (Site.FC1, Site.K, Site.V, Site.ROUTES),
)
_ROWS_A_VERSION = 256
_WORD = 8


@dataclass(frozen=True, slots=True)
class Expected:
    """The records of one engine with ``rows`` rows, one a position.

    Two trajectories name the same rows: ``whole`` is told at once and then again and again,
    ``grown`` a piece at a time, at times as computed anew into rows that are never sent.
    """

    engine_id: str
    rows: int

    @property
    def whole(self) -> str:
        return f"{self.engine_id}/whole"

    @property
    def grown(self) -> str:
        return f"{self.engine_id}/grown"

    def payload(self, part: Part, first: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of rows [first, stop): uint8 [n, R]."""
        width = LAYOUT.row_bytes(part)
        words = -(-width // _WORD)
        salt = np.uint64(zlib.crc32(f"{self.engine_id} {part}".encode()) << 20)
        rows_n1 = np.arange(first, stop, dtype=np.uint64)[:, None] << np.uint64(16)
        bytes_nR = _mixed(salt + rows_n1 + np.arange(words, dtype=np.uint64)).view(np.uint8)
        return np.ascontiguousarray(bytes_nR[:, :width])

    def tokens(self, stop: int) -> NDArray[np.int32]:
        """Return the tokens of positions [0, stop): int32 [T]."""
        salt = np.uint64(zlib.crc32(self.engine_id.encode()))
        mixed_T = _mixed(salt + np.arange(stop, dtype=np.uint64))
        return (mixed_T % np.uint64(150_000)).astype(np.int32)

    def version(self, row: int) -> str:
        """Return the weight version with which a row is computed."""
        return f"v{row // _ROWS_A_VERSION}"

    def end_of_version(self, row: int) -> int:
        """Return the first row after ``row`` that is computed with other weights."""
        return min(self.rows, (row // _ROWS_A_VERSION + 1) * _ROWS_A_VERSION)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble counters (the finalizer of SplitMix64, Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        words = words * np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))
