"""Read scattered rows out of the store, each checked, into the bytes of one frame.

Rows that follow each other in a block are read as one run: a prompt is a few runs, while a decoded
token's row stands alone among those of the other requests of its forward pass. What the runs point
to is joined in one call, which costs little more than the bytes do. To send long runs as they lie
in memory costs no less: their checksum then reads them first, and the socket reads them from afar.

Shapes: N = rows asked for, P = those of one piece, V = those of them that are intact, S = bytes of
the selected columns of a row, C = rows of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.index.grouping import stretches
from bridge.observe.logs import Event, event
from bridge.store import Held, Reader, Run, Store, Wanted
from bridge.store.row_sums import row_is_intact

log = logging.getLogger(__name__)

# A frame of this size is written by one core and sent by another out of the caches between them.
PIECE_BYTES = 2 << 20
# A run of at least so many rows has its columns copied by numpy, a shorter one is cut row by row.
_STRIDED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """P rows asked for from the one at ``begin`` on: bool [P], and the bytes of the valid ones.

    They stand in ``views``, one after the other, until the next piece is read.
    """

    begin: int
    valid: NDArray[np.bool_]
    views: Iterable[memoryview]

    def rows(self, row_bytes: int) -> NDArray[np.uint8]:
        """Return the rows joined: uint8 [V, S]."""
        return np.frombuffer(b"".join(self.views), dtype=np.uint8).reshape(-1, row_bytes)


class Gather:
    """Reads rows and counts those that are damaged; a damaged row is a missing row."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.corrupt_rows = 0

    def pieces(
        self, row_bytes: int, columns: Sequence[slice], places_N: NDArray[np.void]
    ) -> Iterator[Piece]:
        """Yield the rows at PLACE [N] in pieces of PIECE_BYTES at most, or of one row.

        ``columns`` are those of a row of ``row_bytes`` to return; of none there are no pieces.
        """
        selected = sum(column.stop - column.start for column in columns)
        if selected == 0:
            return
        step = max(1, PIECE_BYTES // selected)
        begins = range(0, len(places_N), step)
        valid_N = places_N["block"] >= 0
        runs = _Runs.of(places_N, valid_N, begins)
        for begin, rows in zip(begins, self._read(runs, row_bytes, valid_N), strict=True):
            cut = rows if selected == row_bytes else _cut(rows, row_bytes, columns)
            yield Piece(begin, valid_N[begin : begin + step], cut)

    def rows(
        self, row_bytes: int, columns: Sequence[slice], places_N: NDArray[np.void]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return all rows at PLACE [N] at once, uint8 [N, S], and which are valid, bool [N].

        Other rows are zero. If there are none, the rows may be read only.
        """
        selected = sum(column.stop - column.start for column in columns)
        rows_NS: NDArray[np.uint8] | None = None
        valid_N = np.zeros(len(places_N), dtype=np.bool_)
        for piece in self.pieces(row_bytes, columns, places_N):
            if len(piece.valid) == len(places_N) and piece.valid.all():
                return piece.rows(selected), piece.valid
            if rows_NS is None:
                rows_NS = np.zeros((len(places_N), selected), dtype=np.uint8)
            at = slice(piece.begin, piece.begin + len(piece.valid))
            valid_N[at] = piece.valid
            rows_NS[at][piece.valid] = piece.rows(selected)
        if rows_NS is None:
            rows_NS = np.zeros((len(places_N), selected), dtype=np.uint8)
        return rows_NS, valid_N

    def _read(
        self, runs: _Runs, row_bytes: int, valid_N: NDArray[np.bool_]
    ) -> Iterator[list[memoryview]]:
        """Yield views that hold the rows of each piece; mark what is lost."""
        views = self._in_memory(runs, row_bytes)
        if views is not None:
            for first, end in pairwise(runs.bounds):
                yield views[first:end]
            return
        listed = runs.listed()
        with self._store.reader(Wanted(row_bytes, listed)) as read:
            for first, end in pairwise(runs.bounds):
                yield self._intact(read, row_bytes, listed[first:end], valid_N)

    def _in_memory(self, runs: _Runs, row_bytes: int) -> list[memoryview] | None:
        """Return a view a run, None unless all of them are whole and beyond doubt."""
        payloads = self._store.in_memory(runs.blocks.tolist())
        if payloads is None:
            return None
        begins = runs.offsets.astype(np.int64) * row_bytes
        lengths = runs.counts * row_bytes
        ends = (begins + lengths).tolist()
        views = [
            payload[begin:end]
            for payload, begin, end in zip(payloads, begins.tolist(), ends, strict=True)
        ]
        return views if sum(map(len, views)) == lengths.sum() else None

    def _intact(
        self, read: Reader, row_bytes: int, runs: Sequence[Run], valid_N: NDArray[np.bool_]
    ) -> list[memoryview]:
        """Return views of one or more rows that hold those of the runs; mark what is lost."""
        rows: list[memoryview] = []
        for run in runs:
            block, first, at, count = run
            held = read(block)
            if held is not None:
                begin = (first - held.first_row) * row_bytes
                end = begin + count * row_bytes
                view = held.payload[begin:end]
                if len(view) == end - begin:
                    if held.sums is None:
                        rows.append(view)
                    else:
                        rows += self._checked(held, view, run, valid_N)
                    continue
            valid_N[at : at + count] = False
        return rows

    def _checked(
        self, held: Held, view: memoryview, run: Run, valid_N: NDArray[np.bool_]
    ) -> Iterator[memoryview]:
        """Yield the rows of a run that have still the bytes that the engine sent."""
        assert held.sums is not None
        block, first, at, count = run
        row_bytes = view.nbytes // count
        begin = first - held.first_row
        expected = held.sums[begin : begin + count].tolist()
        for index in range(count):
            row = view[index * row_bytes : (index + 1) * row_bytes]
            if index < len(expected) and row_is_intact(block, first + index, row, expected[index]):
                yield row
                continue
            valid_N[at + index] = False
            self.corrupt_rows += 1
            log.warning(
                "row %d of entry %d fails its checksum",
                first + index,
                block,
                extra=event(Event.ROW_DAMAGED, entry=block, row=first + index),
            )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of held rows, none of which crosses the begin of a piece.

    blocks, offsets   the entry of a run and the place of its first row there
    starts, counts    its first row among those asked for, and how many there are
    bounds            the runs of piece i are those from bounds[i] to bounds[i + 1]
    """

    blocks: NDArray[np.int32]
    offsets: NDArray[np.uint32]
    starts: NDArray[np.intp]
    counts: NDArray[np.intp]
    bounds: list[int]

    @classmethod
    def of(cls, places_N: NDArray[np.void], held_N: NDArray[np.bool_], begins: range) -> Self:
        """Find the runs of rows at PLACE [N]; ``held_N`` says which rows are held."""
        blocks, offsets = places_N["block"], places_N["offset"]
        breaks_N = np.empty(len(places_N), dtype=np.bool_)
        breaks_N[1:] = (blocks[1:] != blocks[:-1]) | (offsets[1:] != offsets[:-1] + np.uint32(1))
        breaks_N[:: begins.step] = True
        starts, counts = stretches(breaks_N)
        held = held_N[starts]
        starts = starts[held]
        bounds: list[int] = starts.searchsorted([*begins, len(places_N)]).tolist()
        return cls(blocks[starts], offsets[starts], starts, counts[held], bounds)

    def listed(self) -> list[Run]:
        """Return the runs one by one."""
        columns = (self.blocks, self.offsets, self.starts, self.counts)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _cut(
    views: Iterable[memoryview], row_bytes: int, columns: Sequence[slice]
) -> Iterator[memoryview]:
    """Yield the bytes of some columns of rows, row by row, in pieces."""
    for rows in views:
        if rows.nbytes >= _STRIDED_ROWS * row_bytes:
            rows_CR = np.frombuffer(rows, dtype=np.uint8).reshape(-1, row_bytes)
            cut_CS = np.concatenate([rows_CR[:, column] for column in columns], axis=1)
            yield cut_CS.reshape(-1).data
            continue
        for at in range(0, rows.nbytes, row_bytes):
            for column in columns:
                yield rows[at + column.start : at + column.stop]
