"""Round the weight matrices of all experts of a layer, those that changed since the last time.

Two launches for any number of experts: one reads all matrices and makes a fingerprint and the
largest magnitudes of each, one rounds the matrices whose fingerprint is new. Nothing waits for the
device. `megatron_trace.layers.weights.ExpertWeight` is the reference.

Shape legend: E matrices, O rows and I columns of each, P projections stacked along the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.triton_arithmetic import (
    decode_e2m1,
    float_of,
    magnitude_bits,
    power_scale,
    quantize_nvfp4_blocks,
    round_bf16,
    upcast,
)

_TILE_VALUES = 8192
# Odd constants of SplitMix64, as signed numbers.
_MIX_1: tl.constexpr = tl.constexpr(-7046029254386353131)
_MIX_2: tl.constexpr = tl.constexpr(-4658895280553007687)


def read_matrices(
    pointers_E: Tensor, shape_OI: tuple[int, int], projections: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return fingerprints int64 [E] and the bits of the largest magnitudes int32 [E, P].

    Args:
        pointers_E: int64, addresses of contiguous matrices on the pointers' device.
        shape_OI: rows and columns of every matrix; P divides O, and I is a multiple of 16.
        projections: P.
        dtype: BF16 or FP32, of every matrix.

    A fingerprint changes with any single value; that many changes cancel out has a chance of about
    2^-64. The bits of magnitudes sort as the magnitudes do, NaN last.
    """
    experts, device = len(pointers_E), pointers_E.device
    print_E = torch.zeros(experts, dtype=torch.int64, device=device)
    amax_EP = torch.zeros((experts, projections), dtype=torch.int32, device=device)
    rows = shape_OI[0] // projections
    tile_rows, padded = _tile(rows, shape_OI[1])
    _read_matrices[(experts, projections, triton.cdiv(rows, tile_rows))](
        pointers_E,
        print_E,
        amax_EP,
        rows,
        shape_OI[1],
        IS_BF16=dtype == torch.bfloat16,
        TILE_ROWS=tile_rows,
        PADDED=padded,
        num_warps=8,
    )
    return print_E, amax_EP


def round_changed(
    pointers_E: Tensor,
    rounded_EOI: Tensor,
    now: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    rollout_dtype: torch.dtype,
) -> None:
    """Write the matrices whose ``now`` differs from ``kept``, rounded, to ``rounded_EOI``.

    Args:
        pointers_E: as in `read_matrices`.
        rounded_EOI: contiguous, of the matrices' dtype; other experts' part is left as it is.
        now: fingerprints int64 [E] and magnitude bits int32 [E, P] of the matrices.
        kept: the same of what ``rounded_EOI`` holds; becomes ``now``.
        rollout_dtype: the dtype in which the rollout holds the weights before it quantizes them.
    """
    experts, rows, width = rounded_EOI.shape
    projections = now[1].shape[1]
    rows //= projections
    tile_rows, padded = _tile(rows, width)
    _round_changed[(experts, projections, triton.cdiv(rows, tile_rows))](
        pointers_E,
        rounded_EOI,
        *now,
        *kept,
        rows,
        width,
        IS_BF16=rounded_EOI.dtype == torch.bfloat16,
        THROUGH_BF16=rollout_dtype == torch.bfloat16,
        TILE_ROWS=tile_rows,
        PADDED=padded // 16,
        num_warps=8,
    )
    for old, new in zip(kept, now, strict=True):
        old.copy_(new)


def _tile(rows: int, width: int) -> tuple[int, int]:
    """Return how many rows a program takes, and the columns with padding."""
    padded = triton.next_power_of_2(width)
    return max(1, min(_TILE_VALUES // padded, triton.next_power_of_2(rows))), padded


@triton.jit
def _load(pointers, expert, value, live, IS_BF16: tl.constexpr):
    """Load values of an expert's matrix as FP32."""
    address = tl.load(pointers + expert)
    if IS_BF16:
        matrix = address.to(tl.pointer_type(tl.bfloat16))
    else:
        matrix = address.to(tl.pointer_type(tl.float32))
    return upcast(tl.load(matrix + value, mask=live, other=0.0))


@triton.jit
def _read_matrices(
    pointers,
    prints,
    amax,
    rows,
    width,
    IS_BF16: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    expert, projection = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_R = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column_I = tl.arange(0, PADDED)
    live = (row_R < rows)[:, None] & (column_I < width)[None, :]
    value = ((projection * rows + row_R) * width)[:, None].to(tl.int64) + column_I[None, :]
    x = _load(pointers, expert, value, live, IS_BF16)
    bits = x.to(tl.int32, bitcast=True)
    mixed = value * _MIX_1 + bits.to(tl.int64) * _MIX_2
    mixed = (mixed ^ (mixed >> 29)) * _MIX_1
    mixed = tl.where(live, mixed ^ (mixed >> 32), 0)
    tl.atomic_add(prints + expert, tl.sum(tl.sum(mixed, axis=1), axis=0))
    largest = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    tl.atomic_max(amax + expert * tl.num_programs(1) + projection, largest)


@triton.jit
def _round_changed(
    pointers,
    rounded,
    prints,
    amax,
    kept_prints,
    kept_amax,
    rows,
    width,
    IS_BF16: tl.constexpr,
    THROUGH_BF16: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    expert, projection = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = expert * tl.num_programs(1) + projection
    largest = tl.load(amax + at)
    is_new = tl.load(prints + expert) != tl.load(kept_prints + expert)
    if is_new | (largest != tl.load(kept_amax + at)):
        amax_value = float_of(largest)
        if THROUGH_BF16:
            amax_value = upcast(round_bf16(amax_value))
        scale = power_scale(amax_value.to(tl.int32, bitcast=True))
        block_B = tl.arange(0, PADDED)
        value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
        matrix = rounded + expert * tl.num_programs(1) * rows * width
        for number in range(TILE_ROWS):
            row = tl.program_id(2) * TILE_ROWS + number
            live_BS = (value_BS < width) & (row < rows)
            place_BS = ((projection * rows + row) * width).to(tl.int64) + value_BS
            x_BS = _load(pointers, expert, place_BS, live_BS, IS_BF16)
            if THROUGH_BF16:
                x_BS = upcast(round_bf16(x_BS))
            codes_BS, _, effective_B = quantize_nvfp4_blocks(x_BS, scale)
            y_BS = decode_e2m1(codes_BS) * tl.expand_dims(effective_B, 1)
            if IS_BF16:
                tl.store(matrix + place_BS, round_bf16(y_BS), mask=live_BS)
            else:
                tl.store(matrix + place_BS, y_BS, mask=live_BS)
