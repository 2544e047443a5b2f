"""The plan of joining ranks' shares to a narrowed row, computed once per layout.

Shape legend: B bytes, K expert slots of a layer, W bytes of a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bridge.layout import Part, RecordLayout, Shard, Site
from bridge.layout.columns import as_slices, overlap

# The daemon reads a row with more runs than this whole and divides it here.
_FEW_RUNS = 16

Columns = NDArray[np.int64]
Moves = tuple[tuple[slice, slice], ...]


@dataclass(frozen=True)
class Share:
    """The contribution of one rank's rows to joined rows.

    read    columns of a row that are read from the store; empty: the whole row
    moves   runs of the read bytes and their targets, without bytes of earlier ranks
    again   bytes that an earlier rank sent, too: columns of the read bytes and of the joined row
    slots   the expert slots that vary from row to row, if this rank sends some
    """

    shard: Shard
    read: tuple[slice, ...]
    moves: Moves
    again: tuple[Columns, Columns]
    slots: SlotShare | None = None


@dataclass(frozen=True)
class SlotShare:
    """The expert slots of a rank that sends only the computed ones.

    part    ranks with the same part of every slot have the same number: one of them sends a slot
    layers  first slot of a requested layer, and the columns of its slots in the joined row
    moves   runs of a sent slot, and their targets in a slot of the joined row
    again   the same for bytes of a slot that ranks of other parts send, too
    """

    part: int
    layers: tuple[tuple[int, slice], ...]
    moves: Moves
    again: tuple[Columns, Columns]


@lru_cache(maxsize=64)
def join_plan(
    full: RecordLayout, shards: tuple[Shard, ...], reduced: RecordLayout, part: Part
) -> tuple[Share, ...]:
    """Return the contribution of each shard with bytes of this part to a reduced row."""
    sent = np.zeros(reduced.row_bytes(part), dtype=np.bool_)
    return tuple(_shares(full, shards, reduced, part, sent))


def _shares(
    full: RecordLayout,
    shards: tuple[Shard, ...],
    reduced: RecordLayout,
    part: Part,
    sent_B: NDArray[np.bool_],
) -> Iterator[Share]:
    parts = list(dict.fromkeys(shard.layout.tensor_slice.fc2 for shard in shards))
    for shard in shards:
        source_B, target_B = overlap(full, shard.layout, reduced, part)
        slots = None
        if shard.by_slot and part is Part.FORWARD:
            fixed = ~np.isin(source_B, shard.slot_columns)
            slots = _slots(full, shards, shard, reduced, parts)
            source_B = np.searchsorted(shard.other_columns, source_B[fixed]).astype(np.int64)
            target_B = target_B[fixed]
        read = as_slices(source_B)
        if slots is not None or len(read) > _FEW_RUNS:
            read = ()
        else:
            source_B = np.arange(len(source_B))
        first_B = ~sent_B[target_B]
        sent_B[target_B] = True
        moves = _moves(source_B[first_B], target_B[first_B])
        yield Share(shard, read, moves, (source_B[~first_B], target_B[~first_B]), slots)


def _slots(
    full: RecordLayout,
    shards: tuple[Shard, ...],
    shard: Shard,
    reduced: RecordLayout,
    parts: list[tuple[int, int] | None],
) -> SlotShare | None:
    """Return the slots that a rank contributes, None without any."""
    wanted = reduced.site_layers(Site.FC2)
    if not wanted:
        return None
    source_W, target_W = _within_slot(full, shard, reduced)
    others = {
        column
        for other in shards
        if other.by_slot and other.layout.tensor_slice.fc2 != shard.layout.tensor_slice.fc2
        for column in _within_slot(full, other, reduced)[1].tolist()
    }
    again_W = np.isin(target_W, list(others))
    mine = shard.layout.site_layers(Site.FC2)
    layers = tuple(
        (mine.index(layer) * shard.layout.shape.top_k, reduced.columns(Site.FC2, layer))
        for layer in wanted
        if layer in mine
    )
    return SlotShare(
        parts.index(shard.layout.tensor_slice.fc2),
        layers,
        _moves(source_W, target_W),
        (source_W[again_W], target_W[again_W]),
    )


def _within_slot(
    full: RecordLayout, shard: Shard, reduced: RecordLayout
) -> tuple[Columns, Columns]:
    """Return the sent and requested bytes of a slot as (source, target) offsets in the slot."""
    layers = set(shard.layout.site_layers(Site.FC2)) & set(reduced.site_layers(Site.FC2))
    if not layers:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # All slots have one layout, so the first slot of a layer is enough.
    layer = min(layers)
    one = [layout.narrow((layer,), (Site.FC2,)) for layout in (shard.layout, reduced)]
    source_B, target_B = overlap(full, one[0], one[1], Part.FORWARD)
    first = source_B < one[0].row_bytes(Part.FORWARD) // full.shape.top_k
    return source_B[first], target_B[first]


def _moves(source_B: Columns, target_B: Columns) -> Moves:
    """Return the runs in which both columns are consecutive."""
    if len(source_B) == 0:
        return ()
    breaks = np.flatnonzero((np.diff(source_B) != 1) | (np.diff(target_B) != 1)) + 1
    begins, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(source_B)]
    return tuple(
        (
            slice(int(source_B[begin]), int(source_B[end - 1]) + 1),
            slice(int(target_B[begin]), int(target_B[end - 1]) + 1),
        )
        for begin, end in zip(begins, ends, strict=True)
    )
