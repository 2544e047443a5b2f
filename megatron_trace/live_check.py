"""Checking that the imported Megatron-core calls every hook.

The patch tool compares files; this looks at the functions that will run, so that a stale bytecode
cache, a second copy of Megatron on the path or another package's monkeypatch is found as well.
"""

from __future__ import annotations

import importlib

from bridge.errors import TraceError
from patches.live import code_of, names_in

HOOKED = (
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.preprocess", ("expert_input",)),
    (
        "megatron.core.transformer.moe.moe_layer",
        "MoELayer.routed_experts_compute",
        ("enter_experts", "leave_experts"),
    ),
    ("megatron.core.transformer.mlp", "MLP.forward", ("expert_activation",)),
    (
        "megatron.core.tensor_parallel.layers",
        "ColumnParallelLinear.forward",
        ("expert_weight",),
    ),
    ("megatron.core.tensor_parallel.layers", "RowParallelLinear.forward", ("expert_weight",)),
    ("megatron.core.transformer.attention", "Attention.forward", ("key_value",)),
    ("megatron.core.tensor_parallel.random", "checkpoint", ("bind_micro_batch",)),
    (
        "megatron.core.tensor_parallel.random",
        "CheckpointWithoutOutput.checkpoint",
        ("bind_micro_batch",),
    ),
    (
        "megatron.core.extensions.transformer_engine",
        "te_checkpoint",
        ("bind_micro_batch",),
    ),
)

DOOR = "megatron_trace.hooks"


class UnpatchedMegatron(TraceError):
    """The imported Megatron-core does not call a hook."""


def require_live_hooks() -> None:
    """Refuse a Megatron-core that would silently train without guidance.

    Raises:
        UnpatchedMegatron: naming the first function that does not call its hook.
    """
    for module_name, path, hooks in HOOKED:
        module = importlib.import_module(module_name)
        code = code_of(module, path)
        called = set() if code is None else names_in(code)
        for hook in hooks:
            if hook not in called:
                raise UnpatchedMegatron(
                    f"{path} of {module.__file__} does not call {DOOR}.{hook}: "
                    "run `python -m patches apply megatron-core` in this environment."
                )
