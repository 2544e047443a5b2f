"""Sort (token, slot) rows by expert into tiles, on the device and without atomics.

Shape legend: R = T * K rows (token-major), E experts, M rows of a tile, L tiles at most.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Rows that a program looks at together.
_MIN_CHUNK, _MAX_CHUNK = 128, 4096


def most_tiles(rows: int, num_experts: int, tile_rows: int) -> int:
    """Return the most tiles that `rows` rows can need: every expert leaves one tile half empty."""
    return min(rows, rows // tile_rows + num_experts)


def sort_rows(
    expert_ids_R: Tensor,
    num_experts: int,
    tile_rows: int,
    row_of_LM: Tensor,
    expert_of_L: Tensor,
    count: Tensor,
) -> None:
    """List the rows of every expert in ascending order, a whole number of tiles an expert.

    Rows whose expert id is not 0 <= id < E (SGLang marks a slot of another rank by -1) are left
    out. The result depends on nothing but the ids: no atomics, no host.

    Args:
        expert_ids_R: int32 or int64 [R], contiguous.
        num_experts: E.
        tile_rows: M.
        row_of_LM: int32 [L, M], written in the first `count` tiles; -1 where a tile is not full.
        expert_of_L: int32 [L], written in the first `count` tiles.
        count: int32 [1], the number of tiles, written.
    """
    rows = expert_ids_R.numel()
    assert len(row_of_LM) >= most_tiles(rows, num_experts, tile_rows)
    assert row_of_LM.shape[1] == tile_rows
    assert row_of_LM.is_contiguous()
    assert expert_ids_R.is_contiguous()
    _sort_rows[(num_experts,)](
        expert_ids_R,
        row_of_LM,
        expert_of_L,
        count,
        rows,
        EXPERTS=num_experts,
        # One entry more than there are experts: rows of no expert are counted there.
        BINS=triton.next_power_of_2(num_experts + 1),
        TILE=tile_rows,
        CHUNK=min(max(triton.next_power_of_2(rows), _MIN_CHUNK), _MAX_CHUNK),
    )


@triton.jit
def _sort_rows(
    expert_ids,
    row_of,
    expert_of,
    count,
    rows,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    expert = tl.program_id(0)
    bin_ = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, rows, CHUNK):
        ids = tl.load(expert_ids + first + lane, mask=first + lane < rows, other=-1).to(tl.int32)
        known = (ids >= 0) & (ids < EXPERTS)
        counts += tl.histogram(tl.where(known, ids, EXPERTS), BINS)
    tiles = tl.where(bin_ < EXPERTS, (counts + TILE - 1) // TILE, 0)
    my_tiles = tl.sum(tl.where(bin_ == expert, tiles, 0), axis=0)
    my_first = tl.sum(tl.where(bin_ < expert, tiles, 0), axis=0)
    if expert == 0:
        tl.store(count, tl.sum(tiles, axis=0))
    place = my_first * TILE
    for first in range(0, rows, CHUNK):
        ids = tl.load(expert_ids + first + lane, mask=first + lane < rows, other=-1).to(tl.int32)
        mine = ids == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(row_of + place + rank - 1, first + lane, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)
    spare = tl.arange(0, TILE)
    end = (my_first + my_tiles) * TILE
    tl.store(row_of + place + spare, spare * 0 - 1, mask=place + spare < end)
    for tile in range(my_tiles):
        tl.store(expert_of + my_first + tile, expert)
