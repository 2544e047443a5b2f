"""A pytest plugin: Megatron-LM's own unit tests on a host without CUDA (`pytest -p`).

They ask for one CUDA device and NCCL. Here the CPU is the device and gloo the backend, for the
released and the patched tree alike; a test that needs more fails or is skipped on both.
"""

# ruff: noqa: E402 - the CPU is prepared before anything of Megatron is imported

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from scripts.unchanged import cpu_as_cuda

cpu_as_cuda.prepare()

import torch
import torch.distributed as dist
import typing_extensions
from megatron.core import utils

STAND_INS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "is_initialized": lambda: True,
    "empty_cache": lambda: None,
    "reset_peak_memory_stats": lambda device=None: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "get_device_capability": lambda device=None: (0, 0),
}

if not hasattr(typing, "override"):
    # Megatron-LM's training code is for Python 3.12.
    setattr(typing, "override", typing_extensions.override)  # noqa: B010
if not torch.cuda.is_available():
    for name, stand_in in STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    _init_process_group = dist.init_process_group

    def _with_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        _init_process_group("gloo", *args, **kwargs)

    dist.init_process_group = _with_gloo
    # With one rank all groups are alike, and every gloo group keeps threads until the end: the
    # tests make thousands of groups.
    dist.new_group = lambda *args, **kwargs: dist.group.WORLD
    # Some tests wait for all ranks in a destructor, which may run inside another such wait.
    dist.barrier = lambda *args, **kwargs: None
if utils.get_te_version() is None:
    # 0.16 compares the version of Transformer Engine before it asks whether there is one.
    utils.is_te_min_version = lambda *args, **kwargs: False
