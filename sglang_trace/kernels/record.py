"""Write a quantized row where the record layout and the GEMM want it.

Record bytes have no alignment, so they are stored one by one, neighbours by neighbours.

Shape legend: B blocks of a row (padded), P = B / 4 bytes of 2-bit scales, S = 16 values of a block,
N values of a row.
"""

import triton
import triton.language as tl

from bridge.fp4.triton_arithmetic import bits_of, dequantize_blocks, round_bf16

# Values that `write_operand` orders together: rows are a whole number of such groups.
OPERAND_GROUP = 32


@triton.jit
def write_planes(
    cell, codes_BS, live_B, PADDED: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr
):
    """Store the low `BITS` bit planes of code words: `bridge.fp4.bit_planes.pack_planes`."""
    place = tl.arange(0, 8)[None, None, :]
    lanes = tl.reshape(codes_BS, (PADDED, 2, 8))
    byte_B2 = tl.arange(0, PADDED)[:, None] * 2 + tl.arange(0, 2)[None, :]
    for bit in tl.static_range(BITS):
        plane_B2 = tl.sum(((lanes >> bit) & 1) << place, axis=2)
        tl.store(cell + bit * (BLOCKS * 2) + byte_B2, plane_B2.to(tl.uint8), mask=live_B[:, None])


@triton.jit
def write_scales(
    cell, scales_B, live_B, PADDED: tl.constexpr, BLOCKS: tl.constexpr, SCALE_BITS: tl.constexpr
):
    """Store E4M3 codes, or their low 2 bits as `bridge.fp4.scale_bits.pack_low_scales`."""
    if SCALE_BITS == 8:
        tl.store(cell + tl.arange(0, PADDED), scales_B.to(tl.uint8), mask=live_B)
    else:
        low_B = tl.where(live_B, scales_B & 3, 0)
        if PADDED < 4:
            byte = tl.sum(low_B << (2 * tl.arange(0, PADDED)), axis=0)
            tl.store(cell, byte.to(tl.uint8))
        else:
            low_P4 = tl.reshape(low_B, (PADDED // 4, 4)) << (2 * tl.arange(0, 4)[None, :])
            at_P = tl.arange(0, PADDED // 4)
            byte_P = tl.sum(low_P4, axis=1)
            tl.store(cell + at_P, byte_P.to(tl.uint8), mask=at_P * 4 < BLOCKS)


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
    SCALE_BITS: tl.constexpr,
):
    """Store code planes, block scales and the token's scale: `RecordLayout.write_site`."""
    write_planes(cell, codes_BS, live_B, PADDED, BLOCKS, BITS)
    scales_at = cell + BITS * BLOCKS * 2
    write_scales(scales_at, scales_B, live_B, PADDED, BLOCKS, SCALE_BITS)
    SCALE_BYTES: tl.constexpr = (BLOCKS * SCALE_BITS + 7) // 8
    byte = tl.arange(0, 4)
    tl.store(scales_at + SCALE_BYTES + byte, (bits_of(token_scale) >> (8 * byte)).to(tl.uint8))


@triton.jit
def write_operand(row, codes_BS, effective_B, PADDED: tl.constexpr, BLOCKS: tl.constexpr):
    """Store the dequantized row as BF16, exact, in the order in which the GEMM takes weights apart.

    Of 32 values, eight 16-bit words of packed weights, first those at places 0 of their words, then
    those at places 1, 2 and 3.
    """
    x_BS = round_bf16(dequantize_blocks(codes_BS, effective_B))
    x_G48 = tl.permute(tl.reshape(x_BS, (PADDED // 2, 8, 4)), (0, 2, 1))
    group_G = tl.arange(0, PADDED // 2)[:, None, None]
    place_G48 = group_G * 32 + tl.arange(0, 4)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(row + place_G48, x_G48, mask=group_G < BLOCKS // 2)
