"""FP4 arithmetic in plain torch: the single reference that every kernel is tested against.

Formats
    E2M1   sign, 2 exponent bits, 1 mantissa bit. Code word = sign << 3 | magnitude index; the
           magnitudes are `E2M1_MAGNITUDES` (OCP Microscaling Formats v1.0, table 5).
    NVFP4  blocks of 16 code words with one E4M3 scale, and one FP32 scale per tensor or token.
    MXFP4  blocks of 32 code words with one E8M0 scale (OCP Microscaling Formats v1.0, 6.3).

Non-finite input is never silent: its block gets the scale code that means NaN and code words 0, so
the block dequantizes to NaN. `has_nan_scale` is the host-side detector. Nothing else here waits for
a device.

Shape legend: N values along the quantized (last) dimension; O, I out and in features of a weight.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.formats import NVFP4_BLOCK as NVFP4_BLOCK

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
MXFP4_BLOCK = 32
SIGN_BIT = 8
MAGNITUDE_BITS = 7

# 2^-116 * (smallest E4M3 scale 2^-9) * (smallest code word 2^-1) is 2^-126, the smallest normal
# number of FP32 and BF16: no product of code word and scales is subnormal, so none can be flushed.
MIN_POWER_SCALE = 2.0**-116

_FP32_MANTISSA = 0x007FFFFF
_FP32_EXPONENT = 0x7F800000


def magnitude_index(a: Tensor, rounding: Callable[..., Tensor]) -> Tensor:
    """Place float32 magnitudes 0 <= a <= 6 on the E2M1 code line: uint8 indices 0 to 7.

    The code line is concave and piecewise linear: 2a up to 2, 2 + a up to 4, 4 + a/2 up to 6, and
    the smallest of the three is the piece that holds. Rounding each piece to an integer and then
    taking the smallest gives the rounded index; with ties-to-even the tie goes to the even code
    word because the pieces' offsets 0, 2 and 4 are even. `rounding` is `torch.round`,
    `torch.floor` or `torch.ceil`.
    """
    # In place: memory for large temporaries costs the CPU more than the arithmetic.
    index = a * 2
    rounding(index, out=index)
    piece = rounding(a).add_(2)
    torch.minimum(index, piece, out=index)
    rounding(torch.mul(a, 0.5, out=piece), out=piece).add_(4)
    torch.minimum(index, piece, out=index)
    return index.to(torch.int8).view(torch.uint8)


def sign_bits(z: Tensor) -> Tensor:
    """Return 8 where the sign bit of float32 `z` is set (also of -0.0), else 0, as uint8."""
    return (z.view(torch.int32) >> 28).to(torch.int8).view(torch.uint8) & SIGN_BIT


def clipped_magnitude(z: Tensor) -> Tensor:
    """Return min(|z|, 6), and 6 for NaN, in new memory."""
    return z.abs().clamp_(max=E2M1_MAX).nan_to_num_(nan=E2M1_MAX)


def encode_e2m1(z: Tensor) -> Tensor:
    """Round float32 `z` to the nearest E2M1 code word, ties to the even code: uint8, same shape.

    Magnitudes above 6, infinity included, saturate at 6. The sign bit is kept, also when the value
    is -0.0 or rounds to zero. E2M1 cannot say NaN: a NaN becomes magnitude 6, so callers carry
    non-finite values in the block scale, as `quantize_nvfp4` does.

    Raises:
        TypeError: if `z` is not float32.
    """
    if z.dtype != torch.float32:
        raise TypeError(f"E2M1 rounding is defined on float32, not {z.dtype}: convert first.")
    return magnitude_index(clipped_magnitude(z), torch.round).bitwise_or_(sign_bits(z))


def decode_e2m1(codes_u8: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of uint8 code words 0 to 15; exact in BF16, FP16 and FP32."""
    index = (codes_u8 & MAGNITUDE_BITS).view(torch.int8)
    # Twice the magnitude, an integer; the convex inverse of `magnitude_index`.
    doubled = torch.maximum(torch.maximum(index, index * 2 - 4), index * 4 - 16)
    quarter_signs = 4 - (codes_u8 & SIGN_BIT).view(torch.int8)
    return doubled.to(dtype).mul_(quarter_signs).mul_(0.125)


def pack_nibbles(codes_u8: Tensor) -> Tensor:
    """Pack uint8 code words [..., N] two to a byte, the even index in the low nibble: [..., N/2].

    Raises:
        ValueError: if N is odd.
    """
    if codes_u8.shape[-1] % 2:
        raise ValueError(f"Packing needs an even number of code words, not {codes_u8.shape[-1]}.")
    return codes_u8[..., 0::2] | (codes_u8[..., 1::2] << 4)


def unpack_nibbles(packed_u8: Tensor) -> Tensor:
    """Return the uint8 code words [..., N] of packed bytes [..., N/2]."""
    return torch.stack((packed_u8 & 0xF, packed_u8 >> 4), dim=-1).flatten(-2)


def encode_e4m3(x: Tensor) -> Tensor:
    """Round float32 `x` to E4M3 bits, ties to even, finite values saturating at 448: uint8.

    NaN and both infinities become 0x7F: an infinite scale must not pass for 448.
    """
    # Whether torch's own cast saturates or gives NaN above 464 depends on its release and device.
    saturated = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isfinite(x), saturated, E4M3_NAN)


def decode_e4m3(bits_u8: Tensor) -> Tensor:
    """Return the float32 values of E4M3 bits; 0x7F and 0xFF are NaN."""
    return bits_u8.view(torch.float8_e4m3fn).to(torch.float32)


def encode_e8m0(x: Tensor) -> Tensor:
    """Return the E8M0 code of the smallest power of two >= float32 `x`: uint8, value 2^(code-127).

    Zero, negative values and everything up to 2^-127 become code 0, finite values above 2^127
    saturate at code 254, NaN and infinities become 255, which is E8M0's NaN.
    """
    bits = x.view(torch.int32)  # below zero for negative values
    smallest = bits <= 1 << 22  # 2^-127 is the FP32 subnormal with the top mantissa bit
    code = ((bits + _FP32_MANTISSA) >> 23).clamp_(max=254).masked_fill_(smallest, 0)
    return torch.where(torch.isfinite(x), code, E8M0_NAN).to(torch.uint8)


def decode_e8m0(codes_u8: Tensor) -> Tensor:
    """Return the float32 values 2^(code-127) of E8M0 codes; 255 is NaN."""
    code = codes_u8.to(torch.int32)
    bits = torch.where(code == 0, 1 << 22, code << 23)
    return torch.where(code == E8M0_NAN, torch.nan, bits.view(torch.float32))


@dataclass(frozen=True)
class Fp4Tensor:
    """A tensor in NVFP4 (block 16) or MXFP4 (block 32).

    codes_u8      uint8 [..., N], one E2M1 code word a byte (see `pack_nibbles`)
    scales_u8     uint8 [..., N / block], E4M3 bits if block is 16, E8M0 codes if block is 32
    global_scale  float32 [] (one a tensor) or [..., 1] (one a token)
    """

    codes_u8: Tensor
    scales_u8: Tensor
    global_scale: Tensor
    block: int

    def effective_scale(self) -> Tensor:
        """Return block scale * global scale: float32 [..., N / block]."""
        decode = decode_e4m3 if self.block == NVFP4_BLOCK else decode_e8m0
        return decode(self.scales_u8) * self.global_scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return code * block scale * global scale, in float32, rounded once to `dtype`."""
        values = torch.unflatten(decode_e2m1(self.codes_u8), -1, (-1, self.block))
        return (values * self.effective_scale().unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_nvfp4(x: Tensor, global_scale: Tensor) -> Fp4Tensor:
    """Quantize `x` [..., N] of any float dtype to NVFP4, blocks of 16 along the last dimension.

    The block scale is E4M3(min(amax / 6 / global_scale, 448)) and the code words are
    E2M1(x / (block scale * global scale)), all in float32. A block whose scale rounds to zero gets
    code words 0. A block that holds NaN or infinity, or whose global scale is NaN, gets scale code
    0x7F and code words 0: it dequantizes to NaN.

    Args:
        x: values, N a multiple of 16.
        global_scale: float32 [] or [..., 1]; `token_scale(x)` and `tensor_scale(x)` give powers of
            two, any other positive FP32 number is legal.

    Raises:
        ValueError: if N is not a multiple of 16.
    """
    blocks = _blocks(x, NVFP4_BLOCK)
    scales_u8 = encode_e4m3(_unrounded_scales(blocks, global_scale))
    effective = decode_e4m3(scales_u8) * global_scale
    return Fp4Tensor(encode_blocks(blocks, effective), scales_u8, global_scale, NVFP4_BLOCK)


def block_scales(x: Tensor, global_scale: Tensor) -> Tensor:
    """Return the block scales of `quantize_nvfp4` before E4M3 rounds them: float32 [..., N / 16].

    Arguments and errors as there.
    """
    return _unrounded_scales(_blocks(x, NVFP4_BLOCK), global_scale)


def quantize_mxfp4(x: Tensor) -> Fp4Tensor:
    """Quantize `x` [..., N] of any float dtype to MXFP4, blocks of 32 along the last dimension.

    The block scale is the smallest power of two >= amax / 6, so nothing saturates (OCP leaves the
    choice of the scale open), within E8M0's range 2^-127 to 2^127. A block that holds NaN or
    infinity gets scale code 0xFF and code words 0. The global scale is 1.

    Raises:
        ValueError: if N is not a multiple of 32.
    """
    blocks = _blocks(x, MXFP4_BLOCK)
    scales_u8 = encode_e8m0(_amax(blocks) / E2M1_MAX)
    codes_u8 = encode_blocks(blocks, decode_e8m0(scales_u8))
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return Fp4Tensor(codes_u8, scales_u8, one, MXFP4_BLOCK)


def quantize_weight(w_OI: Tensor) -> Fp4Tensor:
    """Quantize one weight matrix [O, I] to NVFP4, blocks along I, one power-of-two tensor scale.

    Rollout and trainer both call this function on the same BF16 matrix, so their code words and
    scales are equal bit for bit. For experts it is called once an expert and projection: gate, up
    and down each have a tensor scale of their own.
    """
    return quantize_nvfp4(w_OI, tensor_scale(w_OI))


def token_scale(x: Tensor) -> Tensor:
    """Return the FP32 scale of every token of `x` [..., N]: float32 [..., 1].

    It is the smallest power of two >= amax / (6 * 448), 1.0 for a row of zeros and NaN for a row
    that holds NaN or infinity, and never below `MIN_POWER_SCALE`. Code word * block scale has at
    most 6 significant bits, so with a power of two the product is exact in BF16 and a GEMM sees the
    same operand whether or not the scale is folded in.
    """
    return _power_scale(_amax(x.to(torch.float32)).unsqueeze(-1))


def tensor_scale(w: Tensor) -> Tensor:
    """Return one FP32 scale for the whole of `w`, by the rule of `token_scale`: float32 []."""
    return _power_scale(_amax(w.to(torch.float32).flatten()))


def has_nan_scale(scales_u8: Tensor, block: int = NVFP4_BLOCK) -> bool:
    """Say whether any block scale is NaN, the mark of non-finite input. Waits for the device."""
    if block == NVFP4_BLOCK:
        return bool(((scales_u8 & E4M3_NAN) == E4M3_NAN).any())
    return bool((scales_u8 == E8M0_NAN).any())


def encode_blocks(blocks: Tensor, effective_scale: Tensor) -> Tensor:
    """Round float32 blocks [..., N/block, block] at scales [..., N/block] to code words [..., N].

    Blocks whose scale is zero or NaN get code words 0, sign included: they carry no number.
    """
    return encode_e2m1(scaled_blocks(blocks, effective_scale)).flatten(-2)


def scaled_blocks(blocks: Tensor, effective_scale: Tensor) -> Tensor:
    """Return blocks / scale, and +0.0 throughout a block whose scale is zero or NaN."""
    z = blocks / effective_scale.unsqueeze(-1)
    keep = torch.where(effective_scale > 0, -1, 0).to(torch.int32)
    z.view(torch.int32).bitwise_and_(keep.unsqueeze(-1))
    return z


def _blocks(x: Tensor, block: int) -> Tensor:
    """Upcast [..., N] to float32 and cut it into [..., N/block, block]."""
    if x.shape[-1] % block:
        raise ValueError(f"Blocks of {block} do not divide a last dimension of {x.shape[-1]}.")
    return torch.unflatten(x.to(torch.float32), -1, (-1, block))


def _unrounded_scales(blocks: Tensor, global_scale: Tensor) -> Tensor:
    return _amax(blocks) / E2M1_MAX / global_scale


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitude along the last dimension; NaN wins over every number."""
    return x.abs().amax(dim=-1)


def _power_scale(amax: Tensor) -> Tensor:
    """Return the smallest power of two >= amax / (6 * 448); 1.0 for zero, NaN for non-finite."""
    least = (amax / (E2M1_MAX * E4M3_MAX)).clamp(min=MIN_POWER_SCALE)
    # Adding the whole mantissa carries into the exponent unless the mantissa is already zero.
    power = ((least.view(torch.int32) + _FP32_MANTISSA) & _FP32_EXPONENT).view(torch.float32)
    power = torch.where(amax == 0, 1.0, power)
    return torch.where(torch.isfinite(amax), power, torch.nan)
