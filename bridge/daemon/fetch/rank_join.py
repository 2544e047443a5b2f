"""Join what the ranks of an engine sent of its rows.

A row is valid only if every rank that sends bytes of its part has sent it, whatever is asked for:
all trainer ranks then find the same rows missing. Nor is a row valid whose ranks disagree, on a
byte that several of them sent or on the weights that computed it, or if fc2 is asked for and an
expert slot was sent by nobody or twice: ranks that have lost step with each other must not make a
row that none of them computed.

Shape legend: N = rows asked for, P = rows of a chunk of them, S = ranks that send bytes of them, W
= bytes of a narrowed row, C = expert slots of a row in all layers, K = of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bridge.daemon.fetch.gather import Gather
from bridge.daemon.fetch.join_plan import Share, SlotShare, join_plan
from bridge.index import Engine
from bridge.index.tables.block_table import BlockTable
from bridge.layout import Part, RecordLayout, Shard

# Rows are joined in chunks, because the daemon may read many more bytes than it returns.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of an engine's ranks of some rows, as of the time of `Joining.find`.

    full       layout of a whole row
    shards     shards of the S ranks that send bytes of the part
    locations  LOCATION [N, S] of the shares; all absent for a missing row
    widths     bytes per row in the messages of the shares, int32 [N, S]
    """

    part: Part
    full: RecordLayout
    shards: tuple[Shard, ...]
    locations: NDArray[np.void]
    widths: NDArray[np.int32]

    def __getitem__(self, rows: slice) -> Shares:
        """Return the shares of some of the rows."""
        return replace(self, locations=self.locations[rows], widths=self.widths[rows])


class Joining:
    """Reads the rows of engines with several ranks."""

    def __init__(self, blocks: BlockTable, gather: Gather) -> None:
        self._blocks = blocks
        self._gather = gather

    def find(self, engine: Engine, part: Part, rows_N: NDArray[np.int64]) -> Shares:
        """Return the stored shares of an engine's rows."""
        locations_NS = engine.maps[part].find_each(rows_N)
        versions_NS = self._blocks.versions(locations_NS["block"])
        valid_N = (locations_NS["block"] >= 0).all(axis=1)
        valid_N &= (versions_NS == versions_NS[:, :1]).all(axis=1)
        locations_NS["block"][~valid_N] = -1
        widths_NS = self._blocks.row_bytes(locations_NS["block"])
        return Shares(
            part, engine.hello.layout, tuple(engine.senders(part)), locations_NS, widths_NS
        )

    def rows(
        self, shares: Shares, reduced: RecordLayout
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return (uint8 [N, W], valid bool [N]) in a reduced layout; other rows are zero."""
        part, count = shares.part, len(shares.locations)
        joined_NW = np.zeros((count, reduced.row_bytes(part)), dtype=np.uint8)
        if joined_NW.size == 0:
            return joined_NW, np.zeros(count, dtype=np.bool_)
        valid_N = np.all(shares.locations["block"] >= 0, axis=1)
        plan = join_plan(shares.full, shares.shards, reduced, part)
        step = max(1, _CHUNK_BYTES // shares.full.row_bytes(part))
        for begin in range(0, count, step):
            at = slice(begin, begin + step)
            chunk = _Chunk(joined_NW[at], valid_N[at], {})
            for number, share in enumerate(plan):
                self._add(
                    chunk, share, part, shares.locations[at, number], shares.widths[at, number]
                )
            chunk.finish()
        return joined_NW, valid_N

    def _add(
        self,
        chunk: _Chunk,
        share: Share,
        part: Part,
        locations_P: NDArray[np.void],
        widths_P: NDArray[np.int32],
    ) -> None:
        """Add one rank's share of a chunk."""
        if not share.shard.by_slot or part is Part.KV:
            width = share.shard.layout.row_bytes(part)
            if share.moves or len(share.again[0]):
                read = share.read or (slice(0, width),)
                rows_PB, found_P = self._gather.rows(width, read, locations_P)
                chunk.valid_P &= found_P
                chunk.add(share, slice(None), rows_PB)
            return
        for width, at in _by_width(widths_P):
            read = share.read or (slice(0, width),)
            rows_PB, found = self._gather.rows(width, read, locations_P[at])
            chunk.valid_P[at] &= found
            chunk.add(share, at, rows_PB)
            if share.slots is not None:
                chunk.add_slots(share.shard, share.slots, at, rows_PB)


@dataclass(slots=True)
class _Chunk:
    """Rows that are being joined.

    sent   by slot part: number of ranks that sent each expert slot, uint8 [P, C]
    """

    rows_PW: NDArray[np.uint8]
    valid_P: NDArray[np.bool_]
    sent: dict[int, NDArray[np.uint8]]

    def add(self, share: Share, at: slice | NDArray[np.intp], read_PB: NDArray[np.uint8]) -> None:
        """Put what is the same in all rows into the rows ``at``."""
        for source, target in share.moves:
            self.rows_PW[at, target] = read_PB[:, source]
        source_B, target_B = share.again
        if len(source_B):
            known = self.rows_PW[at][:, target_B]
            self.valid_P[at] &= (known == read_PB[:, source_B]).all(axis=1)

    def add_slots(
        self, shard: Shard, slots: SlotShare, at: NDArray[np.intp], packed: NDArray[np.uint8]
    ) -> None:
        """Put the expert slots that one rank computed into the rows ``at``."""
        computed, cells = shard.unpacked(packed)
        known = {part: sent[at] > 0 for part, sent in self.sent.items() if part != slots.part}
        sent = self.sent.setdefault(
            slots.part, np.zeros((len(self.rows_PW), shard.slots), dtype=np.uint8)
        )
        sent[at] += computed
        place = np.cumsum(computed, axis=1) - 1
        top_k = shard.layout.shape.top_k
        for first, columns in slots.layers:
            row, slot = np.nonzero(computed[:, first : first + top_k])
            values = cells[row, place[row, first + slot]]
            # A view, because the slots of a layer lie together.
            target = self.rows_PW[:, columns].reshape(len(self.rows_PW), top_k, -1)
            if len(slots.again[0]) and known:
                self._compare(slots, at, row, first + slot, values, target[at[row], slot], known)
            for within, goes in slots.moves:
                target[at[row], slot, goes] = values[:, within]

    def _compare(
        self,
        slots: SlotShare,
        at: NDArray[np.intp],
        row: NDArray[np.intp],
        slot: NDArray[np.intp],
        values: NDArray[np.uint8],
        held: NDArray[np.uint8],
        known: dict[int, NDArray[np.bool_]],
    ) -> None:
        """Give rows up whose slots have bytes that ranks of other parts sent otherwise."""
        source_W, target_W = slots.again
        differ = (values[:, source_W] != held[:, target_W]).any(axis=1)
        both = np.logical_or.reduce([sent[row, slot] for sent in known.values()])
        self.valid_P[at[row[differ & both]]] = False

    def finish(self) -> None:
        """Invalidate rows of which no rank or two ranks sent a slot; set them to zero."""
        for sent in self.sent.values():
            self.valid_P &= (sent == 1).all(axis=1)
        self.rows_PW[~self.valid_P] = 0


def _by_width(widths_P: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield (bytes of a row, which of the rows have them) for every width that occurs."""
    for width in np.unique(widths_P[widths_P > 0]).tolist():
        yield width, np.flatnonzero(widths_P == width)
