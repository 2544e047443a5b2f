"""Keys or values of the FP4 KV pool in a program's registers, as FP16 and exact.

Code word * block scale has at most 6 significant bits and is a multiple of 2^-24 even with the
factor 2^-14 that the code words come with, so FP16 holds it.

Shape legend: N rows (slot, head), D head size.
"""

import triton
import triton.language as tl

# E2M1's magnitude bits where FP16's exponent ends are the value * 2^-14.
CODE_FACTOR = 2.0**14
_FACTOR: tl.constexpr = tl.constexpr(CODE_FACTOR)


@triton.jit
def code_pairs(packed):
    """Return the E2M1 values of the low and the high nibbles, times 2^-14, as FP16."""
    wide = packed.to(tl.uint16)
    low = ((wide & 0x07) << 9) | ((wide & 0x08) << 12)
    high = ((wide & 0x70) << 5) | ((wide & 0x80) << 8)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def block_scales(scales):
    """Return E4M3 block scales as FP16, exact; E4M3's exponent is FP16's less 8."""
    wide = scales.to(tl.uint16)
    magnitude = wide & 0x7F
    bits = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7) | ((wide & 0x80) << 8)
    factor = tl.full(bits.shape, 256.0, tl.float16)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) * factor


@triton.jit
def stored_values(codes, scales, at_N, live_N, SIZE: tl.constexpr, N: tl.constexpr):
    """Return the even and odd columns [N, D/2] stored at `at_N`, times 2^-14; 0 where not live."""
    half = tl.arange(0, SIZE // 2)
    block = tl.arange(0, SIZE // 16)
    packed = tl.load(
        codes + at_N[:, None] * (SIZE // 2) + half[None, :], mask=live_N[:, None], other=0
    )
    scale = tl.load(
        scales + at_N[:, None] * (SIZE // 16) + block[None, :], mask=live_N[:, None], other=0
    )
    scale = tl.expand_dims(block_scales(scale), 2)
    scale = tl.reshape(tl.broadcast_to(scale, (N, SIZE // 16, 8)), (N, SIZE // 2))
    even, odd = code_pairs(packed)
    return even * scale, odd * scale


@triton.jit
def as_bf16(values):
    """Return `stored_values` without their factor as BF16, exact: from 2^-10 to 2688."""
    return (values.to(tl.float32) * _FACTOR).to(tl.bfloat16)
