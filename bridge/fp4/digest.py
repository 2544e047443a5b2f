"""A fingerprint of a quantized tensor: two machines compare it to prove that their bits agree."""

import hashlib

import torch
from torch import Tensor

from bridge.fp4.nvfp4 import Fp4Tensor, pack_nibbles


def digest(tensor: Fp4Tensor) -> str:
    """Return the SHA-256 in hex of packed code words, block scales and global scale, in that order.

    Code words are packed two to a byte (even index in the low nibble) and the global scale counts
    as little-endian FP32. Equal digests mean equal numbers, bit for bit.
    """
    return digest_packed(pack_nibbles(tensor.codes_u8), tensor.scales_u8, tensor.global_scale)


def digest_packed(packed_u8: Tensor, scales_u8: Tensor, global_scale: Tensor) -> str:
    """Return the `digest` of a tensor whose code words are packed already."""
    sha = hashlib.sha256()
    for part in (packed_u8, scales_u8, global_scale.to(torch.float32)):
        sha.update(_bytes_of(part))
    return sha.hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
