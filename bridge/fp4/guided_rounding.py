"""Guided rounding: the trainer takes the code word next to its own value that follows the record.

With z = clip(x / rollout scale, -6, 6), the bracket is the pair of E2M1 magnitudes around |z|; the
record names a code word of the rollout, wholly (4 bits) or by its low bits; the guided code word is
the end of the bracket closest to it. On the code line that is a clamp of the recorded index to the
bracket. Source: TRACE (arXiv 2610.07767), algorithm 1 and the bracket rule.

A record of 1 to 3 bits does not hold the sign, which is then taken from z, and a record of 1 or 2
bits fits several magnitudes. The paper leaves open which one is meant, so both rules exist by
name (`MatchRule`). With 1 bit they differ exactly for bit 1 and |z| in (2, 2.25) or (4, 4.5).

Shape legend: N values along the quantized (last) dimension.
"""

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from bridge.fp4.bit_planes import MAX_BITS
from bridge.fp4.nvfp4 import (
    MAGNITUDE_BITS,
    SIGN_BIT,
    clipped_magnitude,
    decode_e2m1,
    magnitude_index,
    quantize_nvfp4,
    scaled_blocks,
    sign_bits,
)


class MatchRule(StrEnum):
    """The rule that picks one of the magnitudes that share the recorded low bits.

    PARITY: the one fewest code steps from z. With 1 bit it is the bracket end of that parity.
    NEAREST: the one whose value is nearest to |z|.
    """

    PARITY = "parity"
    NEAREST = "nearest"


def bracket_e2m1(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the magnitude indices (uint8, 0 to 7) of the code words around float32 |z|.

    The first is the end toward zero, the second the end away from zero; both are the same index
    if z is a code word or |z| >= 6.
    """
    a = clipped_magnitude(z)
    return magnitude_index(a, torch.floor), magnitude_index(a, torch.ceil)


def reconstruct(low_u8: Tensor, z: Tensor, bits: int, rule: MatchRule = MatchRule.PARITY) -> Tensor:
    """Return the code word that the record stands for, given the trainer's own float32 `z`.

    Args:
        low_u8: uint8 [..., N], the low `bits` bits of the rollout's code words.
        z: float32 [..., N], the trainer's values at the rollout's scale.
        bits: 1 to 4; 3 gives the magnitude with the sign of z, 4 the code word as it is.
        rule: see `MatchRule`; it matters for 1 and 2 bits.

    Returns:
        float32 [..., N], E2M1 values.

    Raises:
        ValueError: if `bits` is not 1 to 4.
    """
    a = clipped_magnitude(z)
    index = _recorded_index(low_u8, a, magnitude_index(a, torch.floor), bits, rule)
    sign = (low_u8 & SIGN_BIT) if bits == MAX_BITS else sign_bits(z)
    return decode_e2m1(index | sign)


def guided_codes(
    z: Tensor, low_u8: Tensor, bits: int, rule: MatchRule = MatchRule.PARITY
) -> Tensor:
    """Return the bracket end of float32 `z` closest to the recorded code word: uint8 [..., N].

    The result is a full code word with the sign of z. With 4 bits it is never farther from the
    rollout's code word than round-to-nearest of the same z; with fewer bits that holds whenever the
    rollout's code word is an end of the bracket.

    Raises:
        ValueError: if `bits` is not 1 to 4.
    """
    a = clipped_magnitude(z)
    lower, upper = magnitude_index(a, torch.floor), magnitude_index(a, torch.ceil)
    index = _recorded_index(low_u8, a, lower, bits, rule)
    sign = sign_bits(z)
    if bits == MAX_BITS:
        # Seen from z, every code word of the other sign lies beyond zero.
        index = index * ((low_u8 & SIGN_BIT) == sign).view(torch.uint8)
    return torch.clamp(index, lower, upper) | sign


def guided_quantize(
    x: Tensor,
    scale_f32: Tensor,
    low_u8: Tensor,
    bits: int,
    rule: MatchRule = MatchRule.PARITY,
) -> Tensor:
    """Round `x` [..., N] at the rollout's scales, guided by the record: uint8 code words [..., N].

    Args:
        x: the trainer's activation, any float dtype.
        scale_f32: float32 [..., N / block], the rollout's block scale * global scale.
        low_u8: uint8 [..., N], the low `bits` bits of the rollout's code words.
        bits: 1 to 4.
        rule: see `MatchRule`.

    Code words of blocks whose scale is zero or NaN are 0, sign included. A non-finite x has no code
    word and is clipped here; `guided_fake_quantize` turns it into NaN.
    """
    blocks = torch.unflatten(x.to(torch.float32), -1, (scale_f32.shape[-1], -1))
    return guided_codes(scaled_blocks(blocks, scale_f32).flatten(-2), low_u8, bits, rule)


def guided_fake_quantize(
    x: Tensor,
    scale_f32: Tensor,
    low_u8: Tensor,
    bits: int,
    rule: MatchRule = MatchRule.PARITY,
) -> Tensor:
    """Return `x` [..., N] as guided rounding sees it, same dtype, gradient straight through.

    Arguments as in `guided_quantize`. Where x or its scale is not finite the result is NaN.
    """
    with torch.no_grad():
        codes = guided_quantize(x, scale_f32, low_u8, bits, rule)
        values = torch.unflatten(decode_e2m1(codes), -1, (scale_f32.shape[-1], -1))
        x_hat = (values * scale_f32.unsqueeze(-1)).flatten(-2).to(x.dtype)
        x_hat *= (x - x) + 1  # 1, and NaN where x is not finite
    return straight_through(x, x_hat)


def fake_quantize(x: Tensor, global_scale: Tensor) -> Tensor:
    """Return `x` [..., N] rounded to nearest in NVFP4, same dtype, gradient straight through."""
    with torch.no_grad():
        x_hat = quantize_nvfp4(x, global_scale).dequantize(x.dtype)
    return straight_through(x, x_hat)


def straight_through(x: Tensor, x_hat: Tensor) -> Tensor:
    """Return exactly `x_hat`, bit for bit, whose gradient flows to `x` unchanged.

    Raises:
        ValueError: if shapes or dtypes differ: a cast or a broadcast would hide in the gradient.
    """
    if x.shape != x_hat.shape or x.dtype != x_hat.dtype:
        raise ValueError(
            f"The straight-through value has shape {tuple(x_hat.shape)} and dtype {x_hat.dtype}: "
            f"give it the input's, {tuple(x.shape)} and {x.dtype}."
        )
    result: Tensor = _StraightThrough.apply(x, x_hat)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    """Identity in the second argument forward, in the first one backward.

    `x + (x_hat - x).detach()` has the same gradient but rounds twice on the way forward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, x_hat: Tensor) -> Tensor:
        return x_hat.view_as(x_hat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _recorded_index(low_u8: Tensor, a: Tensor, lower: Tensor, bits: int, rule: MatchRule) -> Tensor:
    """Return the magnitude index 0 to 7 that the record stands for: uint8 [..., N].

    `a` is the clipped magnitude of z and `lower` the index of its bracket end toward zero.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"A record keeps 1 to {MAX_BITS} bits of a code word, not {bits}.")
    if bits >= 3:
        return low_u8 & MAGNITUDE_BITS
    return _nearest_match(low_u8, a, lower, 1 << bits, rule)


def _nearest_match(
    low_u8: Tensor, a: Tensor, lower: Tensor, period: int, rule: MatchRule
) -> Tensor:
    """Return the index congruent to `low_u8` modulo `period` that lies nearest to magnitude `a`.

    Only the last match at or below a and the next one above it can be nearest. Arithmetic is modulo
    256 on purpose: an index below zero shows up as one above 7. A tie goes up; in code steps there
    is a tie only where a is a code word, and then the bracket leaves no choice.
    """
    steps_down = (lower - low_u8) & (period - 1)
    below = lower - steps_down
    above = below + period
    if rule is MatchRule.PARITY:
        up = steps_down >= period // 2
    else:
        up = _magnitude_of(below) + _magnitude_of(above) <= 2 * a
    up = ((below > MAGNITUDE_BITS) | up) & (above <= MAGNITUDE_BITS)
    return below + up.view(torch.uint8) * period


def _magnitude_of(index_u8: Tensor) -> Tensor:
    return decode_e2m1(index_u8 & MAGNITUDE_BITS)
