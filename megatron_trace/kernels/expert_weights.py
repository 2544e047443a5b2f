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
    encode_e2m1,
    encode_e4m3,
    float_of,
    magnitude_bits,
    power_scale,
    quantize_nvfp4_blocks,
    round_bf16,
    upcast,
)

# Words of 8 bytes and blocks of 16 values that one program takes.
_READ_WORDS = 2048
_QUANTIZE_BLOCKS = 128
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
    is_bf16 = dtype == torch.bfloat16
    words = shape_OI[0] // projections * shape_OI[1] // (4 if is_bf16 else 2)
    _read_matrices[(triton.cdiv(words, _READ_WORDS), projections, experts)](
        pointers_E, print_E, amax_EP, words, IS_BF16=is_bf16, WORDS=_READ_WORDS, num_warps=4
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
    per_projection = rows // projections * blocks
    _quantize_changed[(triton.cdiv(per_projection, _QUANTIZE_BLOCKS), projections, experts)](
        pointers_E,
        *fp4,
        *now,
        *kept,
        per_projection,
        IS_BF16=source_dtype == torch.bfloat16,
        THROUGH_BF16=rollout_dtype == torch.bfloat16,
        BLOCKS=_QUANTIZE_BLOCKS,
        num_warps=4,
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


@triton.jit
def _magnitude(word, IS_BF16: tl.constexpr):
    """Return the bits of the largest magnitude, as FP32, of the 4 BF16 or 2 FP32 of a word."""
    if IS_BF16:
        first = tl.maximum(word & 0x7FFF, (word >> 16) & 0x7FFF)
        second = tl.maximum((word >> 32) & 0x7FFF, (word >> 48) & 0x7FFF)
        return tl.maximum(first, second).to(tl.int32) << 16
    else:
        return tl.maximum(word & 0x7FFFFFFF, (word >> 32) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _read_matrices(
    pointers,
    prints,
    amax,
    words,
    IS_BF16: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program reads some words of 8 bytes of one projection of one expert."""
    expert, projection = tl.program_id(2).to(tl.int64), tl.program_id(1)
    word_W = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    live_W = word_W < words
    word_W += projection * words
    matrix = tl.load(pointers + expert).to(tl.pointer_type(tl.int64))
    x_W = tl.load(matrix + word_W, mask=live_W, other=0)
    mixed_W = (x_W ^ (word_W * _MIX_1)) * _MIX_2
    mixed_W = (mixed_W ^ (mixed_W >> 32)) * _MIX_1
    mixed_W = tl.where(live_W, mixed_W ^ (mixed_W >> 29), 0)
    tl.atomic_add(prints + expert, tl.sum(mixed_W, axis=0))
    largest = tl.max(_magnitude(x_W, IS_BF16), axis=0)
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
    blocks,
    IS_BF16: tl.constexpr,
    THROUGH_BF16: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program quantizes some blocks of one projection of one expert, if it has changed."""
    expert = tl.program_id(2).to(tl.int64)
    at = expert * tl.num_programs(1) + tl.program_id(1)
    largest = tl.load(amax + at)
    is_new = tl.load(prints + expert) != tl.load(kept_prints + expert)
    if is_new | (largest != tl.load(kept_amax + at)):
        scale = _scale_of(largest, THROUGH_BF16)
        block_B = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        live_B = block_B < blocks
        source_B = (tl.program_id(1).to(tl.int64) * blocks + block_B)[:, None]
        if IS_BF16:
            # Two values a word: what shares a byte of code words lies in one register.
            words = tl.load(pointers + expert).to(tl.pointer_type(tl.int32))
            word_BH = source_B * 8 + tl.arange(0, 8)[None, :]
            word_BH = tl.load(words + word_BH, mask=live_B[:, None], other=0)
            first_BH, second_BH = float_of(word_BH << 16), float_of(word_BH & -65536)
            bits_BH = tl.maximum(magnitude_bits(first_BH), magnitude_bits(second_BH))
            effective_B, scales_B = _block_scales(tl.max(bits_BH, axis=1), scale)
            low_BH = _encode_bf16(first_BH, effective_B)
            high_BH = _encode_bf16(second_BH, effective_B)
        else:
            matrix = tl.load(pointers + expert).to(tl.pointer_type(tl.float32))
            value_BS = source_B * 16 + tl.arange(0, 16)[None, :]
            x_BS = tl.load(matrix + value_BS, mask=live_B[:, None], other=0.0)
            if THROUGH_BF16:
                x_BS = upcast(round_bf16(x_BS))
            codes_BS, scales_B, _ = quantize_nvfp4_blocks(x_BS, scale)
            low_BH, high_BH = tl.split(tl.reshape(codes_BS, (BLOCKS, 8, 2)))
        packed_BH = (low_BH | (high_BH << 4)).to(tl.uint8)
        block_B = at * blocks + block_B
        byte_BH = block_B[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(codes + byte_BH, packed_BH, mask=live_B[:, None])
        tl.store(scales + block_B, scales_B.to(tl.uint8), mask=live_B)


@triton.jit
def _block_scales(amax_bits_B, global_scale):
    """Return effective scales and E4M3 bits of blocks with these largest magnitudes."""
    amax_B = float_of(amax_bits_B)
    global_B = tl.broadcast_to(global_scale, amax_B.shape)
    six_B = tl.full(amax_B.shape, 6.0, tl.float32)
    scales_B = encode_e4m3(tl.div_rn(tl.div_rn(amax_B, six_B), global_B))
    return decode_e4m3(scales_B) * global_B, scales_B


@triton.jit
def _encode_bf16(x_BH, effective_B):
    """`encode_blocks` of BF16 values, with one division per block.

    A BF16 value has 8 significant bits, a block's scale 4 and a midpoint between code words 3. So a
    quotient is a midpoint or at least 2^-9 of it away, and a product with the reciprocal is within
    2^-22 of the quotient. Rounded to 16 bits it is on the same side, and midpoints are exact.
    """
    is_scaled_B = effective_B > 0  # zero or NaN gives code words 0
    one_B = tl.full(effective_B.shape, 1.0, tl.float32)
    inverse_B = tl.where(is_scaled_B, tl.div_rn(one_B, effective_B), 0.0)
    z_BH = x_BH * tl.expand_dims(inverse_B, 1)
    z_BH = float_of((z_BH.to(tl.int32, bitcast=True) + 0x80) & -256)
    return tl.where(tl.expand_dims(is_scaled_B, 1), encode_e2m1(z_BH), 0)


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
    packed_BH = tl.load(codes + byte_BH, mask=live_B[:, None], other=0).to(tl.int32)
    scale_B = tl.load(scales + block_B, mask=live_B, other=0).to(tl.int32)
    effective_B1 = tl.expand_dims(decode_e4m3(scale_B) * scale, 1)
    first_BH = decode_e2m1(packed_BH & 0xF) * effective_B1
    second_BH = decode_e2m1(packed_BH >> 4) * effective_B1
    if values.dtype.element_ty == tl.bfloat16:
        # A code word has 2 significant bits and a scale 4: BF16 holds the product exactly.
        low_BH = (first_BH.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        high_BH = second_BH.to(tl.int32, bitcast=True) & -65536
        words = values.to(tl.pointer_type(tl.int32))
        tl.store(words + byte_BH, low_BH | high_BH, mask=live_B[:, None])
    else:
        y_BS = tl.reshape(tl.join(first_BH, second_BH), (BLOCKS, 16))
        value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(values + value_BS, y_BS, mask=live_B[:, None])
