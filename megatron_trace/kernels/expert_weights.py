"""The weight matrices of all experts of a layer in FP4, each in a few launches for all of them.

`read_matrices` makes a fingerprint and the largest magnitudes of each matrix, `quantize_changed`
writes the code words of those whose fingerprint is new, and `expand` turns code words into the
values that a GEMM reads. Nothing waits for the device. `megatron_trace.layers.weights.ExpertWeight`
is the reference.

Shape legend: E matrices, O rows and I columns of each, P projections stacked along the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.triton_arithmetic import (
    decode_e2m1,
    decode_e4m3,
    float_of,
    magnitude_bits,
    power_scale,
    quantize_nvfp4_blocks,
    round_bf16,
    upcast,
)

_TILE_VALUES = 8192
_EXPAND_BLOCKS = 256
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


def quantize_changed(
    pointers_E: Tensor,
    source_dtype: torch.dtype,
    fp4: tuple[Tensor, Tensor],
    now: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    rollout_dtype: torch.dtype,
) -> None:
    """Write the code words and block scales of the matrices whose ``now`` differs from ``kept``.

    Args:
        pointers_E: as in `read_matrices`.
        source_dtype: BF16 or FP32, of every matrix.
        fp4: packed code words uint8 [E, O, I / 2], two values a byte, the first in the low bits,
            and E4M3 block scales uint8 [E, O, I / 16]; what did not change is left as it is.
        now: fingerprints int64 [E] and magnitude bits int32 [E, P] of the matrices.
        kept: the same of what ``fp4`` holds; becomes ``now``.
        rollout_dtype: the dtype in which the rollout holds the weights before it quantizes them.
    """
    experts, rows, blocks = fp4[1].shape
    projections = now[1].shape[1]
    rows //= projections
    tile_rows, padded = _tile(rows, blocks * 16)
    _quantize_changed[(experts, projections, triton.cdiv(rows, tile_rows))](
        pointers_E,
        *fp4,
        *now,
        *kept,
        rows,
        blocks,
        IS_BF16=source_dtype == torch.bfloat16,
        THROUGH_BF16=rollout_dtype == torch.bfloat16,
        TILE_ROWS=tile_rows,
        PADDED=padded // 16,
        num_warps=8,
    )
    for old, new in zip(kept, now, strict=True):
        old.copy_(new)


def expand(
    fp4: tuple[Tensor, Tensor], amax_EP: Tensor, rollout_dtype: torch.dtype, values_EOI: Tensor
) -> None:
    """Write the values of code words to ``values_EOI``, contiguous BF16 or FP32 [E, O, I].

    ``fp4``, the magnitude bits ``amax_EP`` and ``rollout_dtype`` are those of `quantize_changed`.
    """
    experts, rows, blocks = fp4[1].shape
    per_projection = rows // amax_EP.shape[1] * blocks
    _expand[(triton.cdiv(per_projection, _EXPAND_BLOCKS), amax_EP.shape[1], experts)](
        *fp4,
        amax_EP,
        values_EOI,
        per_projection,
        THROUGH_BF16=rollout_dtype == torch.bfloat16,
        BLOCKS=_EXPAND_BLOCKS,
        num_warps=4,
    )


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
def _scale_of(amax_bits, THROUGH_BF16: tl.constexpr):
    """Return the tensor scale of a matrix with this largest magnitude."""
    amax = float_of(amax_bits)
    if THROUGH_BF16:
        amax = upcast(round_bf16(amax))
    return power_scale(amax.to(tl.int32, bitcast=True))


@triton.jit
def _quantize_changed(
    pointers,
    codes,
    scales,
    prints,
    amax,
    kept_prints,
    kept_amax,
    rows,
    blocks,
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
        scale = _scale_of(largest, THROUGH_BF16)
        block_B = tl.arange(0, PADDED)
        value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
        byte_BH = block_B[:, None] * 8 + tl.arange(0, 8)[None, :]
        for number in range(TILE_ROWS):
            row = tl.program_id(2) * TILE_ROWS + number
            live_B = (block_B < blocks) & (row < rows)
            first = ((projection * rows + row) * blocks).to(tl.int64)
            x_BS = _load(pointers, expert, first * 16 + value_BS, live_B[:, None], IS_BF16)
            if THROUGH_BF16:
                x_BS = upcast(round_bf16(x_BS))
            codes_BS, scales_B, _ = quantize_nvfp4_blocks(x_BS, scale)
            low_BH, high_BH = tl.split(tl.reshape(codes_BS, (PADDED, 8, 2)))
            packed_BH = (low_BH | (high_BH << 4)).to(tl.uint8)
            first += expert * tl.num_programs(1) * rows * blocks
            tl.store(codes + first * 8 + byte_BH, packed_BH, mask=live_B[:, None])
            tl.store(scales + first + block_B, scales_B.to(tl.uint8), mask=live_B)


@triton.jit
def _expand(
    codes,
    scales,
    amax,
    values,
    blocks,
    THROUGH_BF16: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program expands some blocks of one projection of one expert."""
    at = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    scale = _scale_of(tl.load(amax + at), THROUGH_BF16)
    block_B = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    live_B = block_B < blocks
    block_B = at * blocks + block_B
    byte_BH = block_B[:, None] * 8 + tl.arange(0, 8)[None, :]
    value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed_BH = tl.load(codes + byte_BH, mask=live_B[:, None], other=0).to(tl.int32)
    codes_BS = tl.reshape(tl.join(packed_BH & 0xF, packed_BH >> 4), (BLOCKS, 16))
    effective_B = decode_e4m3(tl.load(scales + block_B, mask=live_B, other=0).to(tl.int32)) * scale
    y_BS = decode_e2m1(codes_BS) * tl.expand_dims(effective_B, 1)
    if values.dtype.element_ty == tl.bfloat16:
        tl.store(values + value_BS, round_bf16(y_BS), mask=live_B[:, None])
    else:
        tl.store(values + value_BS, y_BS, mask=live_B[:, None])
