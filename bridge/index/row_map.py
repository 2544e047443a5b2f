"""Row number -> place of its bytes, at 16 bytes a row whatever the number of rows.

Pages are made as rows arrive, so an engine may number rows with gaps and a stranger's huge row
number costs one page, not an allocation of its size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridge.index.grouping import groups

PLACE = np.dtype([("block", "<i4"), ("offset", "<u4"), ("crc", "<u4"), ("version", "<i4")])

_PAGE_BITS = 10
_PAGE_ROWS = 1 << _PAGE_BITS
_ABSENT = np.array((-1, 0, 0, -1), dtype=PLACE)


def absent_places(count: int) -> NDArray[np.void]:
    """Return PLACE [count] of rows that are nowhere: block and version are -1."""
    return np.full(count, _ABSENT)


class RowMap:
    """Places of one engine's rows of one record part."""

    def __init__(self) -> None:
        self._pages: dict[int, NDArray[np.void]] = {}
        self.rows = 0

    def put(
        self,
        rows_N: NDArray[np.int64],
        block: int,
        crcs_N: NDArray[np.uint32],
        version: int,
    ) -> None:
        """Place rows at offsets 0..N-1 of ``block``; a row placed before moves there."""
        places_N = np.empty(len(rows_N), dtype=PLACE)
        places_N["block"] = block
        places_N["offset"] = np.arange(len(rows_N))
        places_N["crc"] = crcs_N
        places_N["version"] = version
        for number, at in groups(rows_N >> _PAGE_BITS):
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = absent_places(_PAGE_ROWS)
            slots = rows_N[at] & (_PAGE_ROWS - 1)
            self.rows += len(np.unique(slots[page["block"][slots] < 0]))
            page[slots] = places_N[at]

    def find(self, rows_N: NDArray[np.int64]) -> NDArray[np.void]:
        """Return PLACE [N]; ``block`` is -1 for rows that never arrived and for row -1."""
        places_N = absent_places(len(rows_N))
        for number, at in groups(rows_N >> _PAGE_BITS):
            page = self._pages.get(number)
            if page is not None:
                places_N[at] = page[rows_N[at] & (_PAGE_ROWS - 1)]
        return places_N
