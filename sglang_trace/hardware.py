"""Which GPU this host has."""

from __future__ import annotations


def is_hopper() -> bool:
    """Whether torch's first GPU is of the Hopper generation, for which the kernels are made."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
