"""Where there is no GPU, our Triton kernels run in Triton's interpreter.

Triton decides between the two when a function is defined, those of its own library included, and
it imports a part of that (gluon) at the first launch only. So all of it is imported here, before
any test module can import triton; the variable is taken back, so that servers and jobs that tests
start do not inherit it.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

with pytest.MonkeyPatch.context() as _patch:
    if not torch.cuda.is_available():
        _patch.setenv("TRITON_INTERPRET", "1")
    importlib.import_module("triton.experimental.gluon")
    import megatron_trace.kernels
    import sglang_trace.kernels

    for _package in (sglang_trace.kernels, megatron_trace.kernels):
        for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
            importlib.import_module(_module.name)
    importlib.import_module("sglang_trace.attention.extend")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with servers and training jobs first: the short ones fill up the rest."""
    slow = {item.path for item in items if item.get_closest_marker("server")}
    items.sort(key=lambda item: item.path not in slow)
