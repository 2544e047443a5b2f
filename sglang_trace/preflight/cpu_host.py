"""Let SGLang run on a machine without a GPU.

SGLang's kernel package `sgl_kernel` exists for CUDA only, and PyPI's torchvision is a CUDA build
whose operators cannot load beside a CPU build of torch. Both are imported at module level, so both
must be dealt with before SGLang's first import. Nothing here edits another package.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

# The attention backend that needs no compiled kernel.
ATTENTION_BACKEND = "torch_native"
KERNEL_PACKAGE = "sgl_kernel"
# Submodules that SGLang imports by name on a CPU host.
KERNEL_SUBMODULES = ("mamba",)


def is_cpu_host() -> bool:
    """Whether torch sees no accelerator at all."""
    return not torch.cuda.is_available() and not getattr(torch, "xpu", torch.cuda).is_available()


def prepare() -> None:
    """Prepare this process for SGLang on a CPU host; on any other host do nothing."""
    if not is_cpu_host():
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if importlib.util.find_spec(KERNEL_PACKAGE) is None:
        _register_kernel_stand_in()
    _define_torchvision_operators()


def has_kernel_stand_in() -> bool:
    """Whether `sgl_kernel` is the stand-in, without AMX or any other compiled kernel."""
    return isinstance(sys.modules.get(KERNEL_PACKAGE), _KernelStandIn)


class _KernelStandIn(types.ModuleType):
    """A module whose every public name is a function that says what is missing when called.

    `torch.ops.sgl_kernel.convert_weight_packed` stays undefined, which is how SGLang finds out
    that there is no AMX and takes the plain torch path in every layer.
    """

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise NotImplementedError(
                f"{self.__name__}.{name} is a compiled kernel and this host has no GPU: "
                "use --attention-backend torch_native and no speculative decoding."
            )

        return missing


def _register_kernel_stand_in() -> None:
    package = _stand_in(KERNEL_PACKAGE)
    package.__path__ = []
    package.assign_req_to_token_pool_cpu = assign_req_to_token_pool
    for name in KERNEL_SUBMODULES:
        setattr(package, name, _stand_in(f"{KERNEL_PACKAGE}.{name}"))


def _stand_in(name: str) -> Any:
    module = _KernelStandIn(name)
    # find_spec() raises on a module without a spec.
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    sys.modules[name] = module
    return module


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _stride: int,
) -> None:
    """Write each request's new KV slots to its row of the request-to-token table.

    Row `req_pool_indices[i]` gets the next `end[i] - start[i]` entries of `out_cache_loc` at
    positions `start[i]` to `end[i]`.
    """
    taken = 0
    rows = zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
    for row, first, last in rows:
        slots = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += last - first


def _define_torchvision_operators() -> None:
    """Declare the operators for which torchvision registers shapes without looking.

    Only where its own library cannot define them: a CUDA build beside a CPU build of torch.
    """
    if torch.version.cuda is not None or not _torchvision_is_cuda_build():
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


def _torchvision_is_cuda_build() -> bool:
    """Read torchvision's version without importing it: a CUDA build ends in +cu and digits."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations or "torchvision" in sys.modules:
        return False
    version_file = os.path.join(spec.submodule_search_locations[0], "version.py")
    with open(version_file, encoding="utf-8") as handle:
        return "+cu" in handle.readline()
