"""How the bytes of a narrowed row are put together from what each rank sent, worked out once.

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

# A row of more runs than these is read whole and divided here.
_FEW_RUNS = 16

Columns = NDArray[np.int64]
Moves = tuple[tuple[slice, slice], ...]


@dataclass(frozen=True)
class Share:
    """What one rank's rows give to joined rows.

    read    columns of a row that are read from the store; empty: the whole row
    moves   runs of what was read, and where they go, no earlier rank having sent them
    again   bytes that an earlier rank has sent too: columns of what was read, and of the joined row
    slots   the expert slots that vary from row to row, if this rank sends some
    """

    shard: Shard
    read: tuple[slice, ...]
    moves: Moves
    again: tuple[Columns, Columns]
    slots: SlotShare | None = None


@dataclass(frozen=True)
class SlotShare:
    """The expert slots of a rank that sends those it computed.

    part    ranks with the same part of every slot have the same number: one of them sends a slot
    layers  first slot of a layer that is wanted, and the columns of its slots in the joined row
    moves   runs of a slot as it was sent, and where they go in a slot of the joined row
    again   bytes of a slot that ranks of other parts send too, likewise
    """

    part: int
    layers: tuple[tuple[int, slice], ...]
    moves: Moves
    again: tuple[Columns, Columns]


@lru_cache(maxsize=64)
def join_plan(
    full: RecordLayout, shards: tuple[Shard, ...], reduced: RecordLayout, part: Part
) -> tuple[Share, ...]:
    """Return what each of the shards that send this part gives to a reduced row."""
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
    """Return what a rank gives of the slots; None if none are wanted of it."""
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
    """Return the bytes of a slot that are sent and wanted, counted from the slot's first one."""
    layers = set(shard.layout.site_layers(Site.FC2)) & set(reduced.site_layers(Site.FC2))
    if not layers:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # All slots are alike: look at the first one of a layer.
    layer = min(layers)
    one = [layout.narrow((layer,), (Site.FC2,)) for layout in (shard.layout, reduced)]
    source_B, target_B = overlap(full, one[0], one[1], Part.FORWARD)
    first = source_B < one[0].row_bytes(Part.FORWARD) // full.shape.top_k
    return source_B[first], target_B[first]


def _moves(source_B: Columns, target_B: Columns) -> Moves:
    """Return the runs in which both columns follow each other."""
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
