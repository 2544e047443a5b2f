"""Multiply rows by their expert's NVFP4 matrix: y[r] = W[expert of r] @ x[row of x].

Both operands are exact in BF16: the activation is code word * block scale * token scale, as stored
by `record.write_operand`, the weight is code word * block scale. Products have 12 significant bits
and are added up in FP32; the matrix' power-of-two scale multiplies the sum. So the only rounding
is that of the additions and the last one to BF16.

Weights stay as `bridge.fp4.pack_nibbles` stores them and are read as 16-bit words of four code
words, places 4w to 4w + 3, which share a block scale. A tile of words becomes four tiles of
weights, and each meets the quarter of the activation with its places.

The weight's rows are the long side of the product, so the few tokens of a decode step fill the
short side of the tensor cores' tile.

Shape legend: R rows (token, slot), E experts, N outputs, I inputs, L tiles of M rows,
B blocks of a tile, W = 4 B words of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_trace.kernels.arithmetic import decode_e2m1, decode_e4m3, round_bf16, upcast

INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class TileShape:
    """How the GEMM is cut: M rows, N outputs, and W words of four inputs a step."""

    rows: int
    outputs: int
    words: int
    warps: int
    stages: int


# Decode: tiles of the fewest rows a tensor core takes. Prefill: tiles that reuse a weight often.
DECODE = TileShape(rows=16, outputs=64, words=32, warps=4, stages=3)
PREFILL = TileShape(rows=64, outputs=128, words=32, warps=8, stages=3)


def multiply(
    x_RI: Tensor,
    codes_ENI: Tensor,
    scales_ENB: Tensor,
    global_first_E: Tensor,
    global_second_E: Tensor,
    y_RN: Tensor,
    row_of_LM: Tensor,
    expert_of_L: Tensor,
    count: Tensor,
    most: int,
    slots: int,
    shape: TileShape,
    native: bool = not INTERPRETED,
) -> None:
    """Fill the rows of `y_RN` that the first `count` tiles name; leave the others alone.

    Args:
        x_RI: BF16 [R // slots, I], de-interleaved rows as `write_operand` stores them.
        codes_ENI: uint8 [E, N, I/2].
        scales_ENB: uint8 [E, N, I/16] E4M3.
        global_first_E: float32 [E], powers of two, for the first half of the outputs (the gate).
        global_second_E: float32 [E], for the second half (up).
        y_RN: BF16 [R, N], written.
        row_of_LM, expert_of_L, count: from `tiles.sort_rows`.
        most: tiles to launch, at least `count`.
        slots: rows of y that share a row of x: K for fc1, 1 for fc2.
        shape: the tile; `shape.rows` is M.
        native: convert code words by BF16 bit patterns, which Triton's interpreter cannot; the
            other way gives the same operands.
    """
    _experts, outputs, packed = codes_ENI.shape
    assert row_of_LM.shape[1] == shape.rows
    assert x_RI.shape[1] == 2 * packed
    assert all(t.is_contiguous() for t in (x_RI, codes_ENI, scales_ENB, y_RN))
    grid = (triton.cdiv(outputs, shape.outputs), most)
    _multiply[grid](
        x_RI,
        codes_ENI.view(torch.int16),
        scales_ENB,
        global_first_E,
        global_second_E,
        y_RN,
        row_of_LM,
        expert_of_L,
        count,
        slots,
        N=outputs,
        WORDS=packed // 2,
        TILE_M=shape.rows,
        TILE_N=shape.outputs,
        TILE_W=shape.words,
        WHOLE=packed // 2 % shape.words == 0,
        NATIVE=native,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@triton.jit
def _code_words(words, NATIVE: tl.constexpr):
    """Return the four E2M1 values of 16-bit words, times 2^-126 in BF16 if NATIVE, else in FP32.

    E2M1's three magnitude bits, put where BF16's exponent ends, are the value * 2^-126: both
    formats have subnormals. The assembly does it for two words at a time.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 s, m;
            shl.b32 s, $4, 12; shl.b32 m, $4, 6;
            and.b32 m, m, 0x01c001c0; lop3.b32 $0, s, 0x80008000, m, 0xea;
            shl.b32 s, $4, 8; shl.b32 m, $4, 2;
            and.b32 m, m, 0x01c001c0; lop3.b32 $1, s, 0x80008000, m, 0xea;
            shl.b32 s, $4, 4; shr.b32 m, $4, 2;
            and.b32 m, m, 0x01c001c0; lop3.b32 $2, s, 0x80008000, m, 0xea;
            shr.b32 m, $4, 6;
            and.b32 m, m, 0x01c001c0; lop3.b32 $3, $4, 0x80008000, m, 0xea;
            }
            """,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = words.to(tl.int32)
        return (
            decode_e2m1(wide & 15),
            decode_e2m1((wide >> 4) & 15),
            decode_e2m1((wide >> 8) & 15),
            decode_e2m1((wide >> 12) & 15),
        )


@triton.jit
def _block_scales(scales, NATIVE: tl.constexpr):
    """Return E4M3 block scales, times 2^118 in BF16 if NATIVE, else times 2^-8 in FP32.

    So code word * scale carries 2^-8 either way, far from the ends of BF16's range. E4M3's bits
    are the value * 2^-120 where BF16's exponent ends. A scale that is NaN needs no care here: then
    the matrix holds NaN or infinity, and so its global scale is NaN (`bridge.fp4.tensor_scale`).
    """
    if NATIVE:
        small = (scales.to(tl.int16) << 4).to(tl.bfloat16, bitcast=True)
        step = tl.full(small.shape, 2.0**119, tl.bfloat16)
        return (small * step) * step
    else:
        return decode_e4m3(scales.to(tl.int32)) * 2.0**-8


@triton.jit
def load_part(at, place, end, WHOLE: tl.constexpr):
    """Load, with zeros from `end` on. A mask keeps the compiler from copying asynchronously."""
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=place < end, other=0)


@triton.jit
def _multiply(
    x,
    codes,
    scales,
    global_first,
    global_second,
    y,
    row_of,
    expert_of,
    count,
    slots,
    N: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_W: tl.constexpr,
    WHOLE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    tile = tl.program_id(1)
    if tile >= tl.load(count):
        return
    expert = tl.load(expert_of + tile).to(tl.int64)
    row_M = tl.load(row_of + tile * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    out_N = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    weight_N = expert * N + out_N % N
    block_B = tl.arange(0, TILE_W // 4)
    word_W = tl.arange(0, TILE_W)
    codes_NW = codes + weight_N[:, None] * WORDS + word_W[None, :]
    scales_NB = scales + weight_N[:, None] * (WORDS // 4) + block_B[None, :]
    # Empty places compute row 0 and store nothing.
    x_WM = x + (tl.maximum(row_M, 0) // slots)[None, :] * (4 * WORDS) + word_W[:, None]
    sum_NM = tl.zeros((TILE_N, TILE_M), tl.float32)
    for first in range(0, WORDS, TILE_W):
        words_NW = load_part(codes_NW + first, word_W[None, :] + first, WORDS, WHOLE)
        scales_u8_NB = load_part(
            scales_NB + first // 4, block_B[None, :] + first // 4, WORDS // 4, WHOLE
        )
        words_NB4 = tl.reshape(words_NW, (TILE_N, TILE_W // 4, 4))
        scale_NB1 = tl.expand_dims(_block_scales(scales_u8_NB, NATIVE), 2)
        quarters = _code_words(words_NB4, NATIVE)
        for place in tl.static_range(4):
            w_NW = tl.reshape(quarters[place] * scale_NB1, (TILE_N, TILE_W))
            x_part_WM = load_part(
                x_WM + place * WORDS + first, word_W[:, None] + first, WORDS, WHOLE
            )
            if not NATIVE:
                x_part_WM = upcast(x_part_WM)
            sum_NM = tl.dot(w_NW, x_part_WM, sum_NM, input_precision="ieee")
    first_scale = tl.load(global_first + expert)
    second_scale = tl.load(global_second + expert)
    scale_N = tl.where(out_N < N // 2, first_scale, second_scale) * 256.0
    y_NM = round_bf16(sum_NM * scale_N[:, None])
    at_NM = y + row_M[None, :] * N + out_N[:, None]
    tl.store(at_NM, y_NM, mask=(row_M >= 0)[None, :] & (out_N < N)[:, None])
