"""Sizes of FP4 formats and of records made of them; free of torch, so that the daemon is too."""

NVFP4_BLOCK = 16
"""Values that share one E4M3 scale."""

MAX_BITS = 4
"""Bits of an E2M1 code word."""

FULL_SCALE_BITS = 8
LOW_SCALE_BITS = 2
SCALE_BITS = (FULL_SCALE_BITS, LOW_SCALE_BITS)
"""Bits that a record can keep of a block's E4M3 scale: all of them, or the lowest two."""

_LANES = 8


def plane_bytes(n: int, bits: int) -> int:
    """Return the bytes that `bits` bit planes of `n` code words take (`bridge.fp4.bit_planes`)."""
    return bits * n // _LANES


def scale_bytes(n: int, scale_bits: int) -> int:
    """Return the bytes that the block scales of `n` values take (see `bridge.fp4.scale_bits`)."""
    blocks = n // NVFP4_BLOCK
    return -(-blocks * scale_bits // 8)
