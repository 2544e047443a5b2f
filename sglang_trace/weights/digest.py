"""One digest of all weights that a rank computes with, so that a label cannot stand for two.

Expert matrices bring the digests that they have anyway, of whole matrices. Everything else that a
checkpoint fills, parameters and saved buffers, is hashed as it lies in memory. Two servers agree if
they hold the same bits in the same way: with the same release and the same --tp-size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed
import xxhash
from torch import Tensor

from sglang_trace.quantization.moe_method import moe_layers

THREADS = 8
# What a thread copies from a GPU at a time.
PIECE_BYTES = 64 << 20


def digest_of_model(model: torch.nn.Module, experts: Mapping[str, str]) -> str:
    """Return the digest in hex of a model's weights; `experts` are those of its expert matrices.

    Waits for the device.
    """
    inside = tuple(f"{name}." for name, _layer, _method in moe_layers(model))
    others = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and not name.startswith(inside or ("\0",))
    }
    if torch.cuda.is_available():
        # The threads below copy on streams of their own.
        torch.cuda.synchronize()
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(others, threads.map(digest_of_tensor, others.values()), strict=True))
    lines = [f"{name} {found[name]}" for name in sorted(found)]
    lines += [f"{name} {experts[name]}" for name in sorted(experts)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of_tensor(tensor: Tensor) -> str:
    """Return a digest in hex of a tensor's type, shape and bytes; lets other threads run."""
    digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    bytes_n = tensor.detach().contiguous().flatten().view(torch.uint8)
    for first in range(0, len(bytes_n), PIECE_BYTES):
        digest.update(bytes_n[first : first + PIECE_BYTES].cpu().numpy().data)
    return digest.hexdigest()


def one_of_all_ranks(group: torch.distributed.ProcessGroup) -> Callable[[str], str]:
    """Return what makes one digest, the same on all ranks of a group, of the digest of each.

    All ranks have to call it at the same time.
    """

    def agree(digest: str) -> str:
        size = torch.distributed.get_world_size(group)
        found = [""] * size
        torch.distributed.all_gather_object(found, digest, group=group)
        return hashlib.sha256("\n".join(found).encode()).hexdigest()

    return agree
