"""Join what the ranks of an engine sent of its rows.

A row is valid only if every rank that sends bytes of its part has sent it, whatever is asked for:
all trainer ranks then find the same rows missing. Nor is a row valid whose ranks disagree, on a
byte that several of them sent or on the weights that computed it, or whose expert slots nobody
sent: ranks that have lost step with each other must not make a row that none of them computed.

Shapes: N = rows asked for, W = bytes of a narrowed row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bridge.daemon.gather import Gather
from bridge.index import Engine
from bridge.index.block_table import BlockTable
from bridge.layout import Part, RecordLayout, Shard
from bridge.layout.selection import as_slices, overlap

_PIECE_BYTES = 4 << 20


class Joining:
    """Reads the rows of engines that several ranks make up."""

    def __init__(self, blocks: BlockTable, gather: Gather) -> None:
        self._blocks = blocks
        self._gather = gather

    def rows(
        self, engine: Engine, part: Part, rows_N: NDArray[np.int64], reduced: RecordLayout
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return (uint8 [N, W], valid bool [N]) in a reduced layout; other rows are zero."""
        joined = _Joined(len(rows_N), reduced.row_bytes(part))
        if joined.rows_NW.size == 0:
            return joined.rows_NW, np.zeros(len(rows_N), dtype=np.bool_)
        places_NS = engine.maps[part].find_each(rows_N)
        valid_N = (places_NS["block"] >= 0).all(axis=1)
        versions_NS = self._blocks.versions(places_NS["block"])
        valid_N &= (versions_NS == versions_NS[:, :1]).all(axis=1)
        for number, shard in enumerate(engine.senders(part)):
            places_N = places_NS[:, number].copy()
            places_N["block"][~valid_N] = -1
            bytes_of = overlap(engine.hello.layout, shard.layout, reduced, part)
            if len(bytes_of[0]):
                self._add(joined, shard, part, places_N, *bytes_of)
        valid_N &= joined.complete()
        joined.rows_NW[~valid_N] = 0
        return joined.rows_NW, valid_N

    def _add(
        self,
        joined: _Joined,
        shard: Shard,
        part: Part,
        places_N: NDArray[np.void],
        source: NDArray[np.int64],
        target: NDArray[np.int64],
    ) -> None:
        """Put columns ``source`` of a shard's rows into columns ``target`` of the joined ones."""
        if not shard.by_slot or part is Part.KV:
            width, columns = shard.layout.row_bytes(part), as_slices(source)
            rows, found_N = self._gather.rows(width, columns, places_N)
            joined.put(np.flatnonzero(found_N), target, rows[found_N])
            return
        wants_slots = bool(np.isin(source, shard.slot_columns).any())
        for width, at in self._by_width(places_N, shard.layout.row_bytes(part)):
            if wants_slots:
                packed, found = self._gather.rows(width, (slice(0, width),), places_N[at])
                rows, there = shard.unpack(packed[found])
                joined.put(at[found], target, rows[:, source], there[:, source])
            else:
                within = as_slices(np.searchsorted(shard.other_columns, source).astype(np.int64))
                rows, found = self._gather.rows(width, within, places_N[at])
                joined.put(at[found], target, rows[found])

    def _by_width(
        self, places_N: NDArray[np.void], row_bytes: int
    ) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield (bytes of a row, some of the rows that have them), a few MiB of them at a time.

        However little of them is wanted, they are read and unpacked whole.
        """
        widths_N = self._blocks.row_bytes(places_N["block"])
        step = max(1, _PIECE_BYTES // row_bytes)
        for width in np.unique(widths_N[widths_N > 0]).tolist():
            at = np.flatnonzero(widths_N == width)
            for begin in range(0, len(at), step):
                yield width, at[begin : begin + step]


class _Joined:
    """Rows that are put together byte by byte."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows_NW = np.zeros((rows, width), dtype=np.uint8)
        self._there_NW = np.zeros((rows, width), dtype=np.bool_)
        self._disagree_N = np.zeros(rows, dtype=np.bool_)

    def put(
        self,
        at: NDArray[np.intp],
        columns: NDArray[np.int64],
        values: NDArray[np.uint8],
        there: NDArray[np.bool_] | bool = True,
    ) -> None:
        """Put ``values`` where they are ``there`` at these rows and columns."""
        place = np.ix_(at, columns)
        known, held = self._there_NW[place], self.rows_NW[place]
        self._disagree_N[at] |= (known & there & (held != values)).any(axis=1)
        self.rows_NW[place] = np.where(there, values, held)
        self._there_NW[place] = known | there

    def complete(self) -> NDArray[np.bool_]:
        """Return which rows have every byte, and one value for each: bool [N]."""
        complete: NDArray[np.bool_] = self._there_NW.all(axis=1) & ~self._disagree_N
        return complete
