"""The experts of Qwen3-30B-A3B in BF16: what the FP4 ones are measured against.

A grouped GEMM in Triton of the same structure as `kernels.grouped_gemm`, and torch's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_timing import microseconds
from sglang_trace.kernels.grouped_gemm import DECODE, PREFILL
from sglang_trace.kernels.moe import tile_shape
from sglang_trace.kernels.tiles import most_tiles, sort_rows

HIDDEN, WIDTH, EXPERTS, SLOTS = 2048, 768, 128, 8


def random_ids(tokens: int) -> Tensor:
    return torch.rand(tokens, EXPERTS, device="cuda").topk(SLOTS).indices.int()


@dataclass
class Routed:
    """Tiles of one set of routes."""

    ids: Tensor
    row_of: Tensor
    expert_of: Tensor
    count: Tensor
    most: int
    experts_used: int

    @classmethod
    def make(cls, tokens: int, tile_rows: int) -> Routed:
        ids = random_ids(tokens)
        most = most_tiles(ids.numel(), EXPERTS, tile_rows)
        row_of = torch.empty(most, tile_rows, dtype=torch.int32, device="cuda")
        expert_of = torch.empty(most, dtype=torch.int32, device="cuda")
        count = torch.empty(1, dtype=torch.int32, device="cuda")
        sort_rows(ids.flatten(), EXPERTS, tile_rows, row_of, expert_of, count)
        return cls(ids, row_of, expert_of, count, most, len(ids.unique()))

    @property
    def tiles(self) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.row_of, self.expert_of, self.count, self.most


@triton.jit
def _bf16_grouped(
    x,
    w,
    y,
    row_of,
    expert_of,
    count,
    slots,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tile = tl.program_id(1)
    if tile >= tl.load(count):
        return
    expert = tl.load(expert_of + tile).to(tl.int64)
    row_M = tl.load(row_of + tile * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    out_N = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    w_NK = w + (expert * N + out_N)[:, None] * K + k[None, :]
    x_KM = x + (tl.maximum(row_M, 0) // slots)[None, :] * K + k[:, None]
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    for first in range(0, K, TILE_K):
        total = tl.dot(tl.load(w_NK + first), tl.load(x_KM + first), total)
    at = y + row_M[None, :] * N + out_N[:, None]
    tl.store(at, total.to(tl.bfloat16), mask=(row_M >= 0)[None, :])


# outputs, inputs, warps, stages by the rows of a tile
BF16_TILES = {
    DECODE.rows: ((64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4)),
    PREFILL.rows: ((128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3)),
}


def best_bf16(weights: list[tuple[Tensor, Tensor]], tokens: int) -> tuple[float, str]:
    """The fastest tile for both GEMMs together."""
    rows = tokens * SLOTS
    tile_rows = tile_shape(rows, EXPERTS).rows
    routed = [Routed.make(tokens, tile_rows) for _ in weights]
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    h = torch.randn(rows, WIDTH, device="cuda").bfloat16()
    both = torch.empty(rows, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    y = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    times = {}
    for tile_n, tile_k, warps, stages in BF16_TILES[tile_rows]:

        def call(i: int, n: int = tile_n, k: int = tile_k, w: int = warps, s: int = stages) -> None:
            most = routed[i].most
            tiles = routed[i].tiles[:3]
            for inputs, matrix, out, slots in (
                (x, weights[i][0], both, SLOTS),
                (h, weights[i][1], y, 1),
            ):
                _experts, outputs, width = matrix.shape
                _bf16_grouped[(outputs // n, most)](
                    inputs, matrix, out, *tiles, slots, outputs, width, tile_rows, n, k,
                    num_warps=w, num_stages=s,
                )  # fmt: skip

        times[f"{tile_n}x{tile_k}, {warps} warps, {stages} stages"] = microseconds(
            call, len(weights)
        )
    how = min(times, key=times.__getitem__)
    return times[how], how


def grouped_mm_time(weights: list[tuple[Tensor, Tensor]], tokens: int) -> float:
    """torch's grouped GEMM on rows that are already sorted by expert."""
    rows = tokens * SLOTS
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    h = torch.randn(rows, WIDTH, device="cuda").bfloat16()
    ends = [
        torch.bincount(random_ids(tokens).flatten(), minlength=EXPERTS).cumsum(0).int()
        for _ in weights
    ]

    def call(index: int) -> None:
        w13, w2 = weights[index]
        torch._grouped_mm(x, w13.transpose(1, 2), offs=ends[index])
        torch._grouped_mm(h, w2.transpose(1, 2), offs=ends[index])

    return microseconds(call, len(weights))
