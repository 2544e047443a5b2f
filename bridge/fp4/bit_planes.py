"""Low-bit records: the first `bits` bit planes of 4-bit code words.

Plane j holds bit j of every code word, eight code words to a byte, element i in byte i // 8 at bit
i % 8. Planes follow each other, plane 0 first, so a record of b bits is the prefix of a record of
b + 1 bits. Bits 0 to 2 are the magnitude index of an E2M1 code word and bit 3 is its sign: a record
of 1 to 3 bits says nothing about the sign, a record of 4 bits is the whole code word.

Shape legend: N code words of one row (a multiple of 8); b bits kept.
"""

import torch
from torch import Tensor

from bridge.formats import MAX_BITS as MAX_BITS
from bridge.formats import plane_bytes as plane_bytes

_LANES = 8


def pack_planes(codes_u8: Tensor, bits: int) -> Tensor:
    """Keep the low `bits` bits of uint8 code words [..., N] as planes: uint8 [..., bits * N / 8].

    Raises:
        ValueError: if `bits` is not 1 to 4 or N is not a multiple of 8.
    """
    _check(codes_u8.shape[-1], bits)
    return torch.cat([_plane(codes_u8, bit) for bit in range(bits)], dim=-1)


def unpack_planes(packed_u8: Tensor, bits: int, n: int) -> Tensor:
    """Return the low `bits` bits of `n` code words as uint8 [..., n]; the inverse of `pack_planes`.

    Raises:
        ValueError: if `bits` is not 1 to 4, `n` is not a multiple of 8, or the last dimension of
            `packed_u8` is not `bits * n / 8`.
    """
    _check(n, bits)
    if packed_u8.shape[-1] != plane_bytes(n, bits):
        raise ValueError(
            f"A record of {bits} bit(s) of {n} code words takes {plane_bytes(n, bits)} bytes, "
            f"not {packed_u8.shape[-1]}: pass the bits and n that it was packed with."
        )
    planes = torch.unflatten(packed_u8, -1, (bits, n // _LANES))
    shifts = torch.arange(_LANES, dtype=torch.uint8, device=packed_u8.device)
    low = (planes.unsqueeze(-1) >> shifts) & 1
    codes = low.select(-3, 0)
    for bit in range(1, bits):
        codes = codes | (low.select(-3, bit) << bit)
    return codes.flatten(-2)


def _plane(codes_u8: Tensor, bit: int) -> Tensor:
    """Return bit `bit` of every code word, eight to a byte: uint8 [..., N / 8]."""
    packed = (codes_u8 >> bit) & 1
    for width in (1, 2, 4):  # bits packed so far; neighbours join
        packed = torch.add(packed[..., 0::2], packed[..., 1::2], alpha=1 << width)
    return packed


def _check(n: int, bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"A record keeps 1 to {MAX_BITS} bits of a code word, not {bits}.")
    if n % _LANES:
        raise ValueError(f"Bit planes need a multiple of {_LANES} code words a row, not {n}.")
