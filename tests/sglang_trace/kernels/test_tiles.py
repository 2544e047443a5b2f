"""The sort by expert against Python's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trace.kernels.tiles import most_tiles, sort_rows
from tests.sglang_trace.kernels.inputs import DEVICE, needs_gpu


def check(ids: list[int], experts: int, tile_rows: int, dtype: torch.dtype = torch.int32) -> None:
    """Sort and compare every tile."""
    most = most_tiles(len(ids), experts, tile_rows)
    row_of = torch.full((most, tile_rows), -7, dtype=torch.int32, device=DEVICE)
    expert_of = torch.full((most,), -7, dtype=torch.int32, device=DEVICE)
    count = torch.full((1,), -7, dtype=torch.int32, device=DEVICE)
    ids_R = torch.tensor(ids, dtype=dtype, device=DEVICE)
    sort_rows(ids_R, experts, tile_rows, row_of, expert_of, count)

    tiles = []
    for expert in range(experts):
        mine = [row for row, id_ in enumerate(ids) if id_ == expert]
        for first in range(0, len(mine), tile_rows):
            tile = mine[first : first + tile_rows]
            tiles.append((expert, tile + [-1] * (tile_rows - len(tile))))
    assert count.item() == len(tiles)
    found = zip(expert_of.tolist(), row_of.tolist(), strict=True)
    assert list(found)[: len(tiles)] == tiles


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 5), max_size=60),
    experts=st.integers(1, 6),
    tile_rows=st.sampled_from((1, 4, 16)),
)
def test_every_row_is_listed_under_its_expert_in_order(
    ids: list[int], experts: int, tile_rows: int
) -> None:
    check(ids, experts, tile_rows)


def test_more_rows_than_one_program_reads_at_once() -> None:
    ids = torch.randint(0, 7, (2500,), generator=torch.Generator().manual_seed(0)).tolist()
    check(ids, 7, 16, torch.int64)


def test_one_expert_takes_every_row() -> None:
    check([3] * 100, 5, 16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tile_rows", [16, 128])
def test_a_prefill_chunk_on_a_gpu(tile_rows: int) -> None:
    ids = torch.randint(-1, 128, (65536,), generator=torch.Generator().manual_seed(1)).tolist()
    check(ids, 128, tile_rows)
