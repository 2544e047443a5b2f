"""Row number -> place of its bytes, at 8 bytes a row and sender whatever the number of rows.

Where the ranks of an engine share its rows every row has as many places as there are senders, and
is complete once all of them are known.

Rows stand in pages of 1024, pages in slabs of 1024. Pages are made as rows arrive, so an engine may
number rows with gaps and a stranger's huge row number costs one page, not an allocation of its
size; a dropped page is used again.

A place is one number: that of the store's entry and, in the last 20 bits, the row's place in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.index.tables.runs import group_indices, runs
from bridge.index.tables.saved import Saved, Snapshot, UnusableCheckpoint, integers, table

PLACE = np.dtype([("block", "<i8"), ("offset", "<u4")], align=True)

_OFFSET_BITS = 20  # a message has at most 2^20 rows (bridge.wire.ingest.MAX_ROWS)
_PAGE_BITS = 10
_PAGE_ROWS = 1 << _PAGE_BITS
_SLAB_BITS = 10
_SLAB_PAGES = 1 << _SLAB_BITS
_FEW_PAGES = 32
_NO_PAGE = -1
_PLACE_BYTES = 8
_ABSENT = -1


def absent_places(count: int) -> NDArray[np.void]:
    """Return PLACE [count] of rows that are nowhere: block is -1."""
    places = np.zeros(count, dtype=PLACE)
    places["block"] = -1
    return places


class RowMap:
    """Places of one engine's rows of one record part.

    ``rows`` counts the complete rows and ``partial_rows`` those that some senders owe. ``highest``
    is each sender's highest row number so far, -1 before the first.
    """

    def __init__(self, senders: int = 1) -> None:
        self._senders = senders
        self._page_bytes = _PAGE_ROWS * _PLACE_BYTES * senders
        self._slabs: list[NDArray[np.int64]] = []
        self._page_at: dict[int, int] = {}
        self._made = 0
        self._free: list[int] = []
        self.rows = 0
        self.partial_rows = 0
        self.highest = [-1] * senders

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: of the slabs, the pages that are made.

        ``page_at`` has the number of a page and where it is in every row.
        """
        made = [slab[:pages] for slab, pages in zip(self._slabs, self._made_of(), strict=True)]
        none = np.empty((0, _PAGE_ROWS, self._senders), dtype=np.int64)
        return {
            "pages": np.concatenate([none, *made]),
            "page_at": table(self._page_at.items(), 2),
            "free": integers(self._free),
            "rows": self.rows,
            "partial_rows": self.partial_rows,
            "highest": integers(self.highest),
        }

    @classmethod
    def restore(cls, saved: Saved, senders: int) -> Self:
        """Make again what gave a snapshot."""
        made = cls(senders)
        pages = saved.array("pages", np.int64, _PAGE_ROWS, senders)
        for begin in range(0, len(pages), _SLAB_PAGES):
            some = pages[begin : begin + _SLAB_PAGES]
            made._slabs.append(made._new_slab())
            made._slabs[-1][: len(some)] = some
        made._made = len(pages)
        made._page_at, made._free = saved.pairs("page_at"), saved.integers("free")
        made.rows, made.partial_rows = saved.integer("rows"), saved.integer("partial_rows")
        made.highest = saved.integers("highest")
        if len(made.highest) != senders:
            raise UnusableCheckpoint("the highest row is not known of every sender")
        if sorted([*made._page_at.values(), *made._free]) != list(range(made._made)):
            raise UnusableCheckpoint("a page of rows is not where it should be")
        return made

    def put(
        self, rows_N: NDArray[np.int64], block: int, sender: int = 0, *, is_run: bool = False
    ) -> None:
        """Place a sender's rows at offsets 0..N-1 of ``block``; one placed before moves there.

        ``is_run``: they count up by one, which need not be found out.
        """
        places_N = np.arange(len(rows_N)) + (block << _OFFSET_BITS)
        highest = int(rows_N[-1]) if is_run else int(rows_N.max())
        self.highest[sender] = max(self.highest[sender], highest)
        for number, at in _run_pages(rows_N) if is_run else _pages(rows_N):
            page = self._page(number)
            self._count(page, -1)
            page[:, sender][rows_N[at] & (_PAGE_ROWS - 1)] = places_N[at]
            self._count(page, 1)

    def find(self, rows_N: NDArray[np.int64]) -> NDArray[np.void]:
        """Return the first sender's PLACE [N] of complete rows.

        ``block`` is -1 for rows that have not arrived from every sender and for row -1.
        """
        places_NS = self.find_each(rows_N)
        places_N = places_NS[:, 0]
        if self._senders > 1:
            places_N[(places_NS["block"] < 0).any(axis=1)] = (-1, 0)
        return places_N

    def find_each(self, rows_N: NDArray[np.int64]) -> NDArray[np.void]:
        """Return every sender's PLACE [N, S]; ``block`` is -1 where it has not sent the row."""
        numbers_N = rows_N >> _PAGE_BITS
        breaks_N = np.empty(len(rows_N), dtype=np.bool_)
        breaks_N[1:] = numbers_N[1:] != numbers_N[:-1]
        firsts, lengths = runs(breaks_N)
        pages = [self._page_at.get(number, _NO_PAGE) for number in numbers_N[firsts].tolist()]
        pages_N = np.array(pages, dtype=np.int64).repeat(lengths)
        slots_N = rows_N & (_PAGE_ROWS - 1)
        packed_NS = np.full((len(rows_N), self._senders), _ABSENT, dtype=np.int64)
        for slab, at in group_indices(pages_N >> _SLAB_BITS):
            if slab >= 0:
                packed_NS[at] = self._slabs[slab][pages_N[at] & (_SLAB_PAGES - 1), slots_N[at]]
        return _unpacked(packed_NS)

    def drop(self, blocks: NDArray[np.int64]) -> None:
        """Forget all rows of these blocks and the pages that held nothing else."""
        for number, at in list(self._page_at.items()):
            page = self._at(at)
            gone = np.isin(page >> _OFFSET_BITS, blocks)
            self._count(page, -1)
            page[gone] = _ABSENT
            self._count(page, 1)
            if not (page >= 0).any():
                del self._page_at[number]
                self._free.append(at)

    def growth(self, rows_N: NDArray[np.int64], *, is_run: bool = False) -> int:
        """Return the memory that placing these rows would take at most; exact if it is much."""
        if is_run and len(rows_N) <= _PAGE_ROWS:
            pages = (int(rows_N[-1]) >> _PAGE_BITS) - (int(rows_N[0]) >> _PAGE_BITS) + 1
            return pages * self._page_bytes
        numbers_N = rows_N >> _PAGE_BITS
        heads = np.concatenate(([0], np.flatnonzero(numbers_N[1:] != numbers_N[:-1]) + 1))
        most = len(heads)
        if most > _FEW_PAGES:
            numbers = set(numbers_N[heads].tolist())
            most = len(numbers - self._page_at.keys()) - len(self._free)
        return max(0, most) * self._page_bytes

    def nbytes(self) -> int:
        """Return the memory that the map takes: that of all pages ever made at a time."""
        return self._made * self._page_bytes

    def _count(self, page: NDArray[np.int64], sign: int) -> None:
        """Add a page's rows to the counts, or with ``sign`` -1 take them off."""
        held = page >= 0
        if self._senders == 1:
            self.rows += sign * int(np.count_nonzero(held))
            return
        senders_R = np.count_nonzero(held, axis=1)
        complete = int(np.count_nonzero(senders_R == self._senders))
        self.rows += sign * complete
        self.partial_rows += sign * (int(np.count_nonzero(senders_R)) - complete)

    def _page(self, number: int) -> NDArray[np.int64]:
        """Return the page with this number, made if it is not there."""
        at = self._page_at.get(number)
        if at is None:
            at = self._page_at[number] = self._free.pop() if self._free else self._new_page()
            self._at(at)[:] = _ABSENT
        return self._at(at)

    def _new_page(self) -> int:
        if self._made == len(self._slabs) << _SLAB_BITS:
            self._slabs.append(self._new_slab())
        self._made += 1
        return self._made - 1

    def _new_slab(self) -> NDArray[np.int64]:
        # Untouched memory is not there yet: a slab costs what its pages in use do.
        return np.empty((_SLAB_PAGES, _PAGE_ROWS, self._senders), dtype=np.int64)

    def _made_of(self) -> Iterator[int]:
        """Yield how many pages of each slab are made."""
        for begin in range(0, self._made, _SLAB_PAGES):
            yield min(_SLAB_PAGES, self._made - begin)

    def _at(self, at: int) -> NDArray[np.int64]:
        page: NDArray[np.int64] = self._slabs[at >> _SLAB_BITS][at & (_SLAB_PAGES - 1)]
        return page


def _unpacked(packed: NDArray[np.int64]) -> NDArray[np.void]:
    places = np.empty(packed.shape, dtype=PLACE)
    places["block"] = packed >> _OFFSET_BITS
    places["offset"] = np.where(packed < 0, 0, packed & ((1 << _OFFSET_BITS) - 1))
    return places


def _run_pages(rows_N: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """Yield (page number, which of the rows are in it) of rows that count up by one."""
    first = int(rows_N[0])
    for number in range(first >> _PAGE_BITS, (first + len(rows_N) - 1 >> _PAGE_BITS) + 1):
        begin = (number << _PAGE_BITS) - first
        yield number, slice(max(begin, 0), begin + _PAGE_ROWS)


def _pages(rows_N: NDArray[np.int64]) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
    """Yield (page number, which of the rows are in it), slices where the rows ascend."""
    numbers_N = rows_N >> _PAGE_BITS
    order: NDArray[np.intp] | None = None
    if bool((np.diff(numbers_N) < 0).any()):
        order = np.argsort(numbers_N, kind="stable")
        numbers_N = numbers_N[order]
    bounds = [0, *(np.flatnonzero(np.diff(numbers_N)) + 1).tolist(), len(rows_N)]
    for begin, end in pairwise(bounds):
        piece = slice(begin, end)
        yield int(numbers_N[begin]), piece if order is None else order[piece]
