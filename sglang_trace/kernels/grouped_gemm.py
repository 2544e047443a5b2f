"""Multiply rows by their expert's NVFP4 matrix: y[r] = W[expert of r] @ x[row of x].

Both operands are exact in BF16: the activation is code word * block scale * token scale, as stored
by `record.write_operand`, the weight is code word * block scale. Products have 12 significant bits
and are added up in FP32; the matrix' power-of-two scale multiplies the sum. So the only rounding
is that of the additions and the last one to BF16.

Weights stay as `bridge.fp4.nvfp4.pack_nibbles` stores them and are read as 16-bit words of four
code words, which share a block scale. Taking words apart gives all first code words, all second
ones and so on; joined by groups of eight words they are in a thread's registers what the tensor
cores want, without any exchange, and activations come in the same order from
`record.write_operand`.

The weight's rows are the long side of the product, so the few tokens of a decode step fill the
short side of the tensor cores' tile.

Shape legend: R rows (token, slot), E experts, N outputs, I inputs, L tiles of M rows,
B blocks, W = 4 B words and K = 4 W inputs of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.triton_arithmetic import decode_e2m1, decode_e4m3, round_bf16, upcast
from sglang_trace.kernels.record import OPERAND_GROUP

INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class TileShape:
    """How the GEMM is cut: M rows, N outputs, and W words of four inputs a step.

    `registers` is the most a thread may use, None for what the compiler wants: fewer let more
    tiles share a processor, so that one converts code words while another multiplies.
    """

    rows: int
    outputs: int
    words: int
    warps: int
    stages: int
    registers: int | None = None


# Decode: tiles of the fewest rows a tensor core takes. For so few experts that a processor has one
# or two tiles, these must ask for much memory ahead. Prefill: tiles that reuse a weight often.
FEW = TileShape(rows=16, outputs=64, words=64, warps=4, stages=5)
DECODE = TileShape(rows=16, outputs=64, words=32, warps=4, stages=3)
PREFILL = TileShape(rows=128, outputs=128, words=32, warps=8, stages=3)


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
        x_RI: BF16 [R // slots, I], rows as `write_operand` orders them.
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
    assert x_RI.shape[1] % OPERAND_GROUP == 0
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
        NATIVE=native,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **({"maxnreg": shape.registers} if shape.registers else {}),
    )


@triton.jit
def _code_words(words, NATIVE: tl.constexpr):
    """Return the four E2M1 values of 16-bit words, times 2^-126 in BF16 if NATIVE, else in FP32.

    E2M1's three magnitude bits, put where BF16's exponent ends, are the value * 2^-126: both
    formats have subnormals. The assembly does it for two words at a time, in 13 instructions: the
    product of a lone code word and 2^j + 2^k holds its sign where one of the two copies puts it
    and its magnitude where the other does, and a mask drops the rest.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 v, m;
            and.b32 m, $4, 0x000f000f; mul.lo.u32 m, m, 0x1040; and.b32 $0, m, 0x81c081c0;
            and.b32 m, $4, 0x00f000f0; mul.lo.u32 m, m, 0x0104; and.b32 $1, m, 0x81c081c0;
            shr.b32 v, $4, 8;
            and.b32 m, v, 0x000f000f; mul.lo.u32 m, m, 0x1040; and.b32 $2, m, 0x81c081c0;
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

    So code word * scale carries 2^-8 either way, far from the ends of BF16's range. E4M3's bits are
    the value * 2^-120 where BF16's exponent ends. A scale that is NaN needs no care here: then the
    matrix holds NaN or infinity, and so its global scale is NaN (`bridge.fp4.nvfp4.tensor_scale`).
    """
    if NATIVE:
        small = (scales.to(tl.int16) << 4).to(tl.bfloat16, bitcast=True)
        step = tl.full(small.shape, 2.0**119, tl.bfloat16)
        return (small * step) * step
    else:
        return decode_e4m3(scales.to(tl.int32)) * 2.0**-8


@triton.jit
def _weights(words_NW, scale_NB, TILE_N: tl.constexpr, TILE_W: tl.constexpr, NATIVE: tl.constexpr):
    """Return code word * scale [N, 4W], sorted by place modulo 4 in every group of 32."""
    words_NB4 = tl.reshape(words_NW, (TILE_N, TILE_W // 4, 4))
    w0, w1, w2, w3 = _code_words(words_NB4, NATIVE)
    scale_NB1 = tl.expand_dims(scale_NB, 2)
    even = tl.join(w0 * scale_NB1, w2 * scale_NB1)
    odd = tl.join(w1 * scale_NB1, w3 * scale_NB1)
    by_word = tl.reshape(tl.join(even, odd), (TILE_N, TILE_W // 8, 8, 2, 2))
    return tl.reshape(tl.permute(by_word, (0, 1, 3, 4, 2)), (TILE_N, 4 * TILE_W))


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
    NATIVE: tl.constexpr,
):
    tile = tl.program_id(1)
    # All asked for before any is waited for; beyond `count` they are memory that nobody wrote.
    # Volatile, or the compiler moves two of them behind the branch.
    tiles = tl.load(count, volatile=True)
    expert = tl.load(expert_of + tile, volatile=True).to(tl.int64)
    rows = row_of + tile * TILE_M + tl.arange(0, TILE_M)
    row_M = tl.load(rows, volatile=True).to(tl.int64)
    if tile >= tiles:
        return
    # Here, not where it is used: then it arrives during the loop.
    first_scale = tl.load(global_first + expert)
    second_scale = tl.load(global_second + expert)
    out_N = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    weight_N = expert * N + out_N % N
    block_B = tl.arange(0, TILE_W // 4)
    word_W = tl.arange(0, TILE_W)
    codes_NW = codes + weight_N[:, None] * WORDS + word_W[None, :]
    scales_NB = scales + weight_N[:, None] * (WORDS // 4) + block_B[None, :]
    place_K = tl.arange(0, 4 * TILE_W)
    # Empty places are zeros and store nothing.
    full_M = row_M >= 0
    x_KM = x + (tl.maximum(row_M, 0) // slots)[None, :] * (4 * WORDS) + place_K[:, None]
    sum_NM = tl.zeros((TILE_N, TILE_M), tl.float32)
    for first in range(0, WORDS, TILE_W):
        if WORDS % TILE_W == 0:
            words_NW = tl.load(codes_NW + first)
            scales_u8_NB = tl.load(scales_NB + first // 4)
            x_hat_KM = tl.load(x_KM + first * 4, mask=full_M[None, :], other=0.0)
        else:
            words_NW = tl.load(codes_NW + first, mask=(first + word_W < WORDS)[None, :], other=0)
            live_B = first + 4 * block_B < WORDS
            scales_u8_NB = tl.load(scales_NB + first // 4, mask=live_B[None, :], other=0)
            live_KM = full_M[None, :] & (first * 4 + place_K < WORDS * 4)[:, None]
            x_hat_KM = tl.load(x_KM + first * 4, mask=live_KM, other=0.0)
        scale_NB = _block_scales(scales_u8_NB, NATIVE)
        w_NK = _weights(words_NW, scale_NB, TILE_N, TILE_W, NATIVE)
        if not NATIVE:
            x_hat_KM = upcast(x_hat_KM)
        sum_NM = tl.dot(w_NK, x_hat_KM, sum_NM, input_precision="ieee")
    scale_N = tl.where(out_N < N // 2, first_scale, second_scale) * 256.0
    y_NM = round_bf16(sum_NM * scale_N[:, None])
    at_NM = y + row_M[None, :] * N + out_N[:, None]
    tl.store(at_NM, y_NM, mask=(row_M >= 0)[None, :] & (out_N < N)[:, None])
