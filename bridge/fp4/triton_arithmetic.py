"""FP4 arithmetic inside kernels: `bridge.fp4.nvfp4` on blocks that a program holds in registers.

Numbers are rounded with integer operations and exact float additions, never with conversion
instructions: the same bits come out of every GPU generation and of Triton's interpreter, and
divisions are IEEE divisions as in the reference.

Shape legend: B blocks of a row (padded to a power of two), S values of a block.
"""

import triton
import triton.language as tl

# E2M1_MAX * E4M3_MAX, and the bits of MIN_POWER_SCALE = 2^-116: see `bridge.fp4.nvfp4`.
_TOKEN_RANGE: tl.constexpr = tl.constexpr(6.0 * 448.0)
_MIN_POWER_BITS: tl.constexpr = tl.constexpr((127 - 116) << 23)
# 1.5 * 2^23: a float32 this large has no fraction bits, so adding it rounds to an integer, ties to
# even, and leaves the integer in the low bits.
_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)
_NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)
_MANTISSA: tl.constexpr = tl.constexpr(0x007FFFFF)


@triton.jit
def bits_of(x):
    """Return the bits of float32 values as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 values of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def upcast(x):
    """Return BF16 or FP32 values as FP32, subnormals included."""
    if x.dtype == tl.bfloat16:
        return float_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x


@triton.jit
def round_bf16(x):
    """Round float32 to BF16, ties to even."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > _INF_BITS, 0x7FC0, rounded)
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def magnitude_bits(x_BS):
    """Return the bits of |x|. They sort as the magnitudes do, infinity and NaN last."""
    return bits_of(x_BS) & 0x7FFFFFFF


@triton.jit
def power_scale(amax_bits):
    """`bridge.fp4.nvfp4.token_scale` of the largest magnitude, given by its bits."""
    range_of = tl.full(amax_bits.shape, _TOKEN_RANGE, tl.float32)
    least_bits = tl.maximum(bits_of(tl.div_rn(float_of(amax_bits), range_of)), _MIN_POWER_BITS)
    # Adding the whole mantissa carries into the exponent unless the mantissa is already zero.
    power = (least_bits + _MANTISSA) & _INF_BITS
    power = tl.where(amax_bits == 0, 0x3F800000, power)  # 1.0
    return float_of(tl.where(amax_bits < _INF_BITS, power, _NAN_BITS))


@triton.jit
def encode_e4m3(x):
    """Round non-negative float32 to E4M3 bits (int32), ties to even; not finite becomes 0x7F."""
    least = tl.minimum(x, 448.0)
    bits = bits_of(least)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^14 leaves multiples of 2^-9, the spacing of the subnormals.
    subnormal = bits_of(least + 16384.0) & 0xF
    code = tl.where(least < 2.0**-6, subnormal, normal)
    # The sign of a NaN is the processor's choice.
    return tl.where(magnitude_bits(x) < _INF_BITS, code, 0x7F)


@triton.jit
def decode_e4m3(code):
    """Return the float32 values of non-negative E4M3 bits (int32); 0x7F is NaN."""
    normal = (code << 20) + (120 << 23)
    value = tl.where(code < 8, code.to(tl.float32) * (2.0**-9), float_of(normal))
    return tl.where(code == 0x7F, float("nan"), value)


@triton.jit
def encode_e2m1(z):
    """Round float32 to E2M1 code words (int32), ties to even, saturating; `z` is not NaN.

    The code line is the smallest of three straight pieces (see `bridge.fp4.nvfp4.magnitude_index`).
    """
    a = tl.minimum(float_of(magnitude_bits(z)), 6.0)
    index = tl.minimum(a * 2.0 + _ROUNDER, a + (_ROUNDER + 2.0))
    index = tl.minimum(index, a * 0.5 + (_ROUNDER + 4.0))
    return (bits_of(index) & 7) | ((bits_of(z) >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """Return the float32 values of E2M1 code words (int32)."""
    index = code & 7
    doubled = tl.maximum(tl.maximum(index, index * 2 - 4), index * 4 - 16)
    return float_of(bits_of(doubled.to(tl.float32) * 0.5) | ((code & 8) << 28))


@triton.jit
def encode_blocks(x_BS, effective_B):
    """Round blocks at their effective scales; a scale that is zero or NaN gives code words 0."""
    scale_BS = tl.broadcast_to(tl.expand_dims(effective_B, 1), x_BS.shape)
    return tl.where(scale_BS > 0, encode_e2m1(tl.div_rn(x_BS, scale_BS)), 0)


@triton.jit
def quantize_nvfp4_blocks(x_BS, global_scale):
    """Return code words [B, S], E4M3 bits [B] and effective scales [B] of one row's blocks.

    `global_scale` is a float32 scalar or [B].
    """
    amax_B = float_of(tl.max(magnitude_bits(x_BS), axis=1))
    global_B = tl.broadcast_to(global_scale, amax_B.shape)
    scales_B = encode_e4m3(
        tl.div_rn(tl.div_rn(amax_B, tl.full(amax_B.shape, 6.0, tl.float32)), global_B)
    )
    effective_B = decode_e4m3(scales_B) * global_B
    return encode_blocks(x_BS, effective_B), scales_B, effective_B


@triton.jit
def quantize_token(x_BS):
    """Return code words [B, S], E4M3 bits [B], effective scales [B] and the token's scale."""
    token_scale = power_scale(tl.max(tl.max(magnitude_bits(x_BS), axis=1), axis=0))
    codes_BS, scales_B, effective_B = quantize_nvfp4_blocks(x_BS, token_scale)
    return codes_BS, scales_B, effective_B, token_scale


@triton.jit
def dequantize_blocks(codes_BS, effective_B):
    """Return code word * effective scale in float32."""
    return decode_e2m1(codes_BS) * tl.expand_dims(effective_B, 1)
