"""Block scales kept as the low 2 bits of their E4M3 code, and how the trainer reads them.

The trainer has a scale of its own for every block: its own block maximum at the rollout's second
scale. Codes of non-negative E4M3 numbers ascend with the numbers, so the rollout's code lies a few
codes from the trainer's, and of the codes with the recorded low bits the nearest one is meant. That
is the rollout's code whenever the two are at most one code apart. Two codes apart, two candidates
are equally near and the block counts as ambiguous; three or more apart, another code is nearer and
nothing in the record shows it.

An ambiguous block is still read, not rounded to nearest: the candidate on that side of the
trainer's code is taken on which the trainer's unrounded scale lies, the upper one if it lies on
neither. It is the likelier one, and the recorded code words mean nothing at another scale.

Four scales share a byte: scale i is in byte i // 4 at bits 2 * (i % 4). Unused bits are 0.

Shape legend: B block scales of one row, P = ceil(B / 4) bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.formats import LOW_SCALE_BITS
from bridge.fp4.nvfp4 import E4M3_NAN, decode_e4m3, encode_e4m3

LOW_SCALE_MASK = (1 << LOW_SCALE_BITS) - 1

_LANES = 8 // LOW_SCALE_BITS
_PERIOD = 1 << LOW_SCALE_BITS
_LARGEST = E4M3_NAN - 1


def pack_low_scales(scales_u8: Tensor) -> Tensor:
    """Keep the low 2 bits of uint8 E4M3 codes [..., B]: uint8 [..., P]."""
    padded = torch.nn.functional.pad(scales_u8 & LOW_SCALE_MASK, (0, -scales_u8.shape[-1] % _LANES))
    pairs = padded[..., 0::2] | (padded[..., 1::2] << LOW_SCALE_BITS)
    return pairs[..., 0::2] | (pairs[..., 1::2] << 2 * LOW_SCALE_BITS)


def unpack_low_scales(packed_u8: Tensor, blocks: int) -> Tensor:
    """Return the low 2 bits of `blocks` scales as uint8 [..., B]; undoes `pack_low_scales`.

    Raises:
        ValueError: if the last dimension of `packed_u8` is not ceil(blocks / 4).
    """
    if packed_u8.shape[-1] != -(-blocks // _LANES):
        raise ValueError(
            f"{blocks} scales of 2 bits take {-(-blocks // _LANES)} bytes, not "
            f"{packed_u8.shape[-1]}: pass the number of blocks that was packed."
        )
    shifts = torch.arange(0, 8, LOW_SCALE_BITS, dtype=torch.uint8, device=packed_u8.device)
    low = (packed_u8.unsqueeze(-1) >> shifts) & LOW_SCALE_MASK
    return low.flatten(-2)[..., :blocks]


@dataclass(frozen=True)
class ReadScales:
    """E4M3 codes as read from their low bits.

    codes_u8   uint8 [..., B], 0 to 0x7E
    ambiguous  bool [..., B], two codes or more from the trainer's own
    """

    codes_u8: Tensor
    ambiguous: Tensor


def read_low_scales(low_u8: Tensor, own_scale: Tensor) -> ReadScales:
    """Return the E4M3 codes with these low bits nearest to the trainer's own scales.

    Args:
        low_u8: uint8 [..., B], the low 2 bits of the rollout's codes.
        own_scale: float32 [..., B], the trainer's unrounded block scales, see
            `bridge.fp4.nvfp4.block_scales`; at NaN the code means nothing.
    """
    own_u8 = encode_e4m3(own_scale).clamp_(max=_LARGEST)
    own = own_u8.to(torch.int16)
    steps_up = (low_u8.to(torch.int16) - own) & LOW_SCALE_MASK
    lies_up = own_scale >= decode_e4m3(own_u8)
    up = (steps_up < _PERIOD // 2) | ((steps_up == _PERIOD // 2) & lies_up)
    code = own + steps_up - torch.where(up, 0, _PERIOD)
    # Beyond the ends of the code line there is nothing but the candidate on the other side.
    code += _PERIOD * ((code < 0).to(torch.int16) - (code > _LARGEST).to(torch.int16))
    return ReadScales(code.to(torch.uint8), (code - own).abs() >= _PERIOD // 2)
