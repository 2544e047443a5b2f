"""Row number -> place of its bytes, at 8 bytes a row whatever the number of rows.

Pages are made as rows arrive, so an engine may number rows with gaps and a stranger's huge row
number costs one page, not an allocation of its size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bridge.index.grouping import groups

PLACE = np.dtype([("block", "<i4"), ("offset", "<u4")])

_PAGE_BITS = 10
_PAGE_ROWS = 1 << _PAGE_BITS
_ABSENT = np.array((-1, 0), dtype=PLACE)

# Where some of the rows stand: (page number, where in the array, where in the page).
_Piece = tuple[int, slice | NDArray[np.intp], slice | NDArray[np.int64]]


def absent_places(count: int) -> NDArray[np.void]:
    """Return PLACE [count] of rows that are nowhere: block is -1."""
    return np.full(count, _ABSENT)


class RowMap:
    """Places of one engine's rows of one record part."""

    def __init__(self) -> None:
        self._pages: dict[int, NDArray[np.void]] = {}
        self.rows = 0

    def put(self, rows_N: NDArray[np.int64], block: int) -> None:
        """Place rows at offsets 0..N-1 of ``block``; a row placed before moves there."""
        places_N = np.empty(len(rows_N), dtype=PLACE)
        places_N["block"] = block
        places_N["offset"] = np.arange(len(rows_N))
        for number, at, slots in _pieces(rows_N):
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = absent_places(_PAGE_ROWS)
            held = np.count_nonzero(page["block"] >= 0)
            page[slots] = places_N[at]
            self.rows += int(np.count_nonzero(page["block"] >= 0) - held)

    def find(self, rows_N: NDArray[np.int64]) -> NDArray[np.void]:
        """Return PLACE [N]; ``block`` is -1 for rows that never arrived and for row -1."""
        places_N = absent_places(len(rows_N))
        for number, at, slots in _pieces(rows_N):
            page = self._pages.get(number)
            if page is not None:
                places_N[at] = page[slots]
        return places_N

    def drop(self, blocks: NDArray[np.int64]) -> None:
        """Forget all rows of these blocks and the pages that held nothing else."""
        for number, page in list(self._pages.items()):
            gone = np.isin(page["block"], blocks)
            page[gone] = _ABSENT
            self.rows -= int(np.count_nonzero(gone))
            if not (page["block"] >= 0).any():
                del self._pages[number]

    def nbytes(self) -> int:
        """Return the memory that the map takes."""
        return len(self._pages) * _PAGE_ROWS * PLACE.itemsize


def _pieces(rows_N: NDArray[np.int64]) -> Iterator[_Piece]:
    """Cut rows at page bounds: slices for a run of consecutive rows, which most messages are."""
    count = len(rows_N)
    if count == 0:
        return
    first = int(rows_N[0])
    if first >= 0 and int(rows_N[-1]) - first == count - 1 and bool((np.diff(rows_N) == 1).all()):
        begin = 0
        while begin < count:
            number, slot = divmod(first + begin, _PAGE_ROWS)
            end = min(count, begin + _PAGE_ROWS - slot)
            yield number, slice(begin, end), slice(slot, slot + end - begin)
            begin = end
        return
    for number, at in groups(rows_N >> _PAGE_BITS):
        yield number, at, rows_N[at] & (_PAGE_ROWS - 1)
