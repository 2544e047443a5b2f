"""Let a Megatron-core that nobody patched run on a host without CUDA.

`megatron_trace.preflight.cpu_host` answers for `torch.cuda`; the released Megatron also writes
`device="cuda"`, `tensor.cuda()`, `tensor.is_cuda` and type names of CUDA tensors, which our `cpu`
patches replace. Here every torch call sees those answered as if the CPU were the CUDA device, on
the released and on the patched tree alike, so that nothing but the patches differs between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_trace.preflight import cpu_host

CPU = torch.device("cpu")
IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class CpuAsCuda(TorchFunctionMode):
    """While active, a CUDA device means the CPU, and CPU tensors say that they are CUDA tensors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == IS_CUDA:
            return True
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return args[0].type().replace("torch.", "torch.cuda.")
        moved = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **moved)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value


def prepare() -> None:
    """Install the stand-ins for the rest of this process; do nothing where CUDA is available."""
    if torch.cuda.is_available():
        return
    CpuAsCuda().__enter__()  # type: ignore[no-untyped-call]
    _stay_active_in_backward()
    cpu_host.prepare()


def _stay_active_in_backward() -> None:
    # torch leaves a mode while it handles a call, and a whole backward pass with all
    # recomputation is one call.
    run_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_engine_in_mode(*args: Any, **kwargs: Any) -> Any:
        with CpuAsCuda():
            return run_engine(*args, **kwargs)

    torch.autograd._engine_run_backward = run_engine_in_mode  # type: ignore[attr-defined]
