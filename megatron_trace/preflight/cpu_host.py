"""Make Megatron-core run on a host without CUDA (gloo, local layers, torch optimizers).

Megatron asks `torch.cuda` for devices, streams, events and random states without a guard. The
stand-ins below answer for the CPU: "current device" is the CPU, streams and events order nothing
because CPU operations are synchronous, and CUDA's generator is torch's default generator.
`prepare()` runs before Megatron is imported and does nothing where CUDA is available.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Event:
    """An event on a synchronous device: always reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    """The only stream of a synchronous device: every instance is equal to every other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return hash(_Stream)


CUDA_STAND_INS: dict[str, Any] = {
    "current_device": lambda: "cpu",
    "synchronize": lambda device=None: None,
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda device=None: _Stream(),
    "stream": lambda stream: contextlib.nullcontext(),
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
}


def prepare() -> None:
    """Install the stand-ins if this host has no CUDA device."""
    if torch.cuda.is_available():
        return
    for name, stand_in in CUDA_STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    _replace_rng_states()
    _name_absent_kernels()


def _replace_rng_states() -> None:
    # Megatron queues state changes until CUDA initializes, which never happens here.
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )


def _name_absent_kernels() -> None:
    # Megatron-core 0.16 asks whether this function of Transformer Engine is None, but gives it a
    # name only where Transformer Engine is installed.
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
