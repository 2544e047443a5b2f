"""Read scattered rows out of the store, each checked, into one array.

Rows that follow each other in a block are read as one run: a prompt is a few runs, while a decoded
token's row stands alone among those of the other requests of its forward pass.

Shapes: N = rows asked for, R = bytes of a full row, S = bytes of its selected columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bridge.observe.logs import Event, event
from bridge.store import Held, Run, Store, Wanted
from bridge.store.row_sums import row_is_intact

log = logging.getLogger(__name__)

# A run of at least so many rows is copied by one strided numpy call, a shorter one row by row.
_STRIDED_ROWS = 4

_Copy = Callable[[memoryview, int, int, int], None]


class Gather:
    """Reads rows and counts those that are damaged; a damaged row is a missing row."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.corrupt_rows = 0

    def rows(
        self, row_bytes: int, columns: Sequence[slice], places_N: NDArray[np.void]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return (uint8 [N, S], valid bool [N]); rows that are not valid are zero."""
        selected = sum(column.stop - column.start for column in columns)
        out_NS = np.empty((len(places_N), selected), dtype=np.uint8)
        valid_N = np.zeros(len(places_N), dtype=np.bool_)
        if out_NS.size == 0:
            return out_NS, valid_N
        copy = _copier(row_bytes, columns, out_NS)
        runs = list(_runs(places_N))
        with self._store.reader(Wanted(row_bytes, runs)) as read:
            for block, first, at, count in runs:
                held = read(block)
                if held is None:
                    continue
                offset = first - held.first_row
                if (offset + count) * row_bytes > held.payload.nbytes:
                    continue
                copy(held.payload, offset, at, count)
                valid_N[at : at + count] = True
                if held.sums is not None:
                    self._check(held, row_bytes, block, offset, valid_N[at : at + count])
        out_NS[~valid_N] = 0
        return out_NS, valid_N

    def _check(
        self, held: Held, row_bytes: int, block: int, offset: int, valid_C: NDArray[np.bool_]
    ) -> None:
        """Mark the rows of a run that have no longer the bytes that the engine sent."""
        assert held.sums is not None
        expected = held.sums[offset : offset + len(valid_C)].tolist()
        for index in range(len(valid_C)):
            begin = (offset + index) * row_bytes
            row = held.payload[begin : begin + row_bytes]
            place = held.first_row + offset + index
            if index >= len(expected) or not row_is_intact(block, place, row, expected[index]):
                valid_C[index] = False
                self.corrupt_rows += 1
                log.warning(
                    "row %d of entry %d fails its checksum",
                    place,
                    block,
                    extra=event(Event.ROW_DAMAGED, entry=block, row=place),
                )


def _runs(places_N: NDArray[np.void]) -> Iterator[Run]:
    """Yield (block, first offset, index of the first row, rows) of every run of held rows."""
    blocks, offsets = places_N["block"], places_N["offset"].astype(np.int64)
    breaks = (np.diff(blocks) != 0) | (np.diff(offsets) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(starts, append=len(blocks))
    held = blocks[starts] >= 0
    starts, counts = starts[held], counts[held]
    runs = (blocks[starts], offsets[starts], starts, counts)
    return zip(*(column.tolist() for column in runs), strict=True)


def _copier(row_bytes: int, columns: Sequence[slice], out_NS: NDArray[np.uint8]) -> _Copy:
    """Return copy(payload, offset, at, count): rows from offset on to out_NS[at : at + count]."""
    out = out_NS.reshape(-1).data
    selected = out_NS.shape[1]

    def copy_whole(payload: memoryview, offset: int, at: int, count: int) -> None:
        source = payload[offset * row_bytes : (offset + count) * row_bytes]
        out[at * row_bytes : (at + count) * row_bytes] = source

    def copy_columns(payload: memoryview, offset: int, at: int, count: int) -> None:
        if count >= _STRIDED_ROWS:
            source = payload[offset * row_bytes : (offset + count) * row_bytes]
            rows_CR = np.frombuffer(source, dtype=np.uint8).reshape(count, row_bytes)
            begin = 0
            for column in columns:
                end = begin + column.stop - column.start
                out_NS[at : at + count, begin:end] = rows_CR[:, column]
                begin = end
            return
        for index in range(count):
            source_at, begin = (offset + index) * row_bytes, (at + index) * selected
            for column in columns:
                end = begin + column.stop - column.start
                out[begin:end] = payload[source_at + column.start : source_at + column.stop]
                begin = end

    return copy_whole if selected == row_bytes else copy_columns
