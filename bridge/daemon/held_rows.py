"""Rows that arrive again: equal bytes are a duplicate, the daemon refuses other bytes.

An engine numbers the tokens that it computes, so a row number names one computation. Most rows
arrive in ascending order. A row above all rows of its rank needs no lookup.

Shape legend: N = rows of a message, M = those that the store has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridge.daemon.fetch.gather import Gather
from bridge.errors import RowTaken, StoreFull
from bridge.index import Catalog
from bridge.store.mooncake.pool import PoolUnreachable
from bridge.wire import Rows, RowsHeader

Sender = tuple[str, int, str]


class HeldRows:
    """Compares arriving rows with stored rows."""

    def __init__(self, catalog: Catalog, gather: Gather) -> None:
        self._catalog = catalog
        self._gather = gather

    def hold(self, message: Rows) -> bool:
        """Whether the store has all rows of a message.

        Raises:
            RowTaken: the store has one of them with other bytes or of other weights.
            StoreFull: stored rows are not readable now.
        """
        block = message.header
        engine = self._catalog.engines[block.engine_id]
        if block.extent.lowest > engine.highest_row(block):
            return False
        locations_N = engine.held_rows(block)
        at_M = np.flatnonzero(locations_N["block"] >= 0)
        if not len(at_M):
            return False
        locations_M = locations_N[at_M]
        blocks_M = locations_M["block"]
        is_other_M = self._catalog.blocks.row_bytes(blocks_M) != block.row_bytes
        is_other_M |= self._catalog.blocks.versions(blocks_M) != self._catalog.version_of(block)
        _refuse(block, at_M[is_other_M])
        try:
            return self._are_equal(message, at_M, locations_M) and len(at_M) == len(block.rows)
        except PoolUnreachable as error:
            raise StoreFull(str(error)) from error

    def _are_equal(
        self, message: Rows, at_M: NDArray[np.intp], locations_M: NDArray[np.void]
    ) -> bool:
        """Whether all stored rows are readable; raise RowTaken if one has other bytes."""
        readable = 0
        row_bytes = message.header.row_bytes
        whole = [slice(0, row_bytes)]
        for chunk in self._gather.chunks(row_bytes, whole, locations_M):
            at_V = at_M[chunk.begin : chunk.begin + len(chunk.valid)][chunk.valid]
            is_other_V = (chunk.rows() != message.payload[at_V]).any(axis=1)
            _refuse(message.header, at_V[is_other_V])
            readable += len(at_V)
        return readable == len(at_M)


class Arriving:
    """The rows of one loop iteration, which the catalog does not have yet."""

    def __init__(self) -> None:
        self._rows: dict[Sender, list[NDArray[np.int64]]] = {}
        self._highest: dict[Sender, int] = {}

    def overlaps(self, block: RowsHeader) -> bool:
        """Whether a row of the block has arrived in this iteration."""
        sender = _sender(block)
        if block.extent.lowest > self._highest.get(sender, -1):
            return False
        return any(bool(np.isin(block.rows, rows).any()) for rows in self._rows[sender])

    def add(self, block: RowsHeader) -> None:
        """Add the rows of a block."""
        sender = _sender(block)
        self._rows.setdefault(sender, []).append(block.rows)
        self._highest[sender] = max(self._highest.get(sender, -1), block.extent.highest)

    def clear(self) -> None:
        """Remove all rows, because the catalog has them now."""
        self._rows.clear()
        self._highest.clear()


def require_distinct(block: RowsHeader) -> None:
    """Raise RowTaken if a message has a row number twice."""
    if block.extent.is_run:
        return
    ordered_N = np.sort(block.rows)
    twice = ordered_N[1:][ordered_N[1:] == ordered_N[:-1]]
    if len(twice):
        raise RowTaken(
            f"engine {block.engine_id} sent row {int(twice[0])} twice in one message; number every "
            "row that is computed once"
        )


def _sender(block: RowsHeader) -> Sender:
    return (block.engine_id, block.shard, block.part.value)


def _refuse(block: RowsHeader, taken: NDArray[np.intp]) -> None:
    if len(taken):
        raise RowTaken(
            f"engine {block.engine_id} sent {block.part.value} row {int(block.rows[taken[0]])} "
            "again with other bytes or of other weights, and the row that is held stays; number "
            "every row that is computed anew, and use a new engine id for every engine process"
        )
