"""Write a quantized row where the record layout and the GEMM want it.

Record bytes have no alignment, so they are stored one by one, neighbours by neighbours.

Shape legend: B blocks of a row (padded), S = 16 values of a block, N values of a row.
"""

import triton
import triton.language as tl

from sglang_trace.kernels.arithmetic import bits_of, dequantize_blocks, round_bf16


@triton.jit
def write_planes(
    cell, codes_BS, live_B, PADDED: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr
):
    """Store the low `BITS` bit planes of code words: `bridge.lowbits.pack_planes`."""
    place = tl.arange(0, 8)[None, None, :]
    lanes = tl.reshape(codes_BS, (PADDED, 2, 8))
    byte_B2 = tl.arange(0, PADDED)[:, None] * 2 + tl.arange(0, 2)[None, :]
    for bit in tl.static_range(BITS):
        plane_B2 = tl.sum(((lanes >> bit) & 1) << place, axis=2)
        tl.store(cell + bit * (BLOCKS * 2) + byte_B2, plane_B2.to(tl.uint8), mask=live_B[:, None])


@triton.jit
def write_site(
    cell,
    codes_BS,
    scales_B,
    token_scale,
    live_B,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Store code planes, E4M3 scales and the token's scale: `RecordLayout.write_site`."""
    write_planes(cell, codes_BS, live_B, PADDED, BLOCKS, BITS)
    scales_at = cell + BITS * BLOCKS * 2
    tl.store(scales_at + tl.arange(0, PADDED), scales_B.to(tl.uint8), mask=live_B)
    byte = tl.arange(0, 4)
    tl.store(scales_at + BLOCKS + byte, (bits_of(token_scale) >> (8 * byte)).to(tl.uint8))


@triton.jit
def write_operand(row, codes_BS, effective_B, live_B, PADDED: tl.constexpr, BLOCKS: tl.constexpr):
    """Store the dequantized row as BF16, exact, and sorted by place modulo 4.

    Four code words of a packed weight share 16 bits: a GEMM that takes apart the 16-bit words of
    a tile has the weights of every fourth place, and meets them with every fourth activation.
    """
    x_BS = round_bf16(dequantize_blocks(codes_BS, effective_B))
    even, odd = tl.split(tl.reshape(x_BS, (PADDED, 4, 2, 2)))
    x0_B4, x2_B4 = tl.split(even)
    x1_B4, x3_B4 = tl.split(odd)
    at_B4 = row + tl.arange(0, PADDED)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(at_B4, x0_B4, mask=live_B[:, None])
    tl.store(at_B4 + BLOCKS * 4, x1_B4, mask=live_B[:, None])
    tl.store(at_B4 + BLOCKS * 8, x2_B4, mask=live_B[:, None])
    tl.store(at_B4 + BLOCKS * 12, x3_B4, mask=live_B[:, None])
