"""Sizes of FP4 formats and of records made of them; free of torch, so that the daemon is too."""

NVFP4_BLOCK = 16
"""Values that share one E4M3 scale."""

MAX_BITS = 4
"""Bits of an E2M1 code word."""

_LANES = 8


def plane_bytes(n: int, bits: int) -> int:
    """Return the bytes that `bits` bit planes of `n` code words take (see `bridge.lowbits`)."""
    return bits * n // _LANES
