"""A stand-in for Transformer Engine's grouped linear layer, for hosts without a GPU.

`TEGroupedMLP` itself is Megatron-core's. The stand-in multiplies with torch, expert by expert, and
does to `main_grad` what Transformer Engine 2.20 does, so what our code has to follow is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe import experts
from torch import Tensor, nn

from megatron_trace import hooks as trace_hooks


class GroupedLinear(nn.Module):
    """Takes what `TEGroupedLinear` takes; `SPLIT` is the dimension tensor parallelism splits."""

    SPLIT = 0

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **settings: Any
    ) -> None:
        super().__init__()
        assert not settings["bias"]
        self.num_gemms = num_gemms
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        shape = [output_size, input_size]
        shape[self.SPLIT] //= settings["pg_collection"].expt_tp.size()
        for index in range(num_gemms):
            weight = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{index}", weight)

    def _get_weight_tensors(self) -> list[Tensor]:
        own = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return trace_hooks.expert_weights(self, own)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        weights = self._get_weight_tensors()
        if self.fuse_wgrad_accumulation:
            return _Fused.apply(x, tuple(m_splits), *weights), None
        parts = zip(x.split(m_splits), weights, strict=True)
        return torch.cat([nn.functional.linear(part, weight) for part, weight in parts]), None


class ColumnGroupedLinear(GroupedLinear):
    SPLIT = 0


class RowGroupedLinear(GroupedLinear):
    SPLIT = 1


class _Fused(torch.autograd.Function):
    """Adds weight gradients to `main_grad`; what it returns for the weights means nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: tuple[int, ...], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.splits = splits
        ctx.origin_weights = [weakref.ref(weight) for weight in weights]
        ctx.main_grads = [lambda i=i: weights[i].main_grad for i in range(len(weights))]
        parts = zip(x.split(splits), weights, strict=True)
        return torch.cat([nn.functional.linear(part, weight) for part, weight in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        parts = list(zip(x.split(ctx.splits), grad.split(ctx.splits), strict=True))
        wgrads: list[Tensor | None] = []
        for (rows, out), reference, main_grad in zip(
            parts, ctx.origin_weights, ctx.main_grads, strict=True
        ):
            weight = reference()
            assert weight is not None
            wgrads.append(None)
            if not weight.requires_grad:
                continue
            main_grad().add_(out.T @ rows)
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
                wgrads[-1] = torch.full_like(weight, torch.nan)
        dgrad = [out @ weight for (_, out), weight in zip(parts, weights, strict=True)]
        return torch.cat(dgrad), None, *wgrads


def _modules(self: Any, *grouped: bool) -> Any:
    """What a spec provider gives for the experts: one builder, or a class and its parts."""
    parts = {"linear_fc1": ColumnGroupedLinear, "linear_fc2": RowGroupedLinear}
    if hasattr(experts, "GroupedMLPSubmodules"):
        return partial(experts.TEGroupedMLP, submodules=experts.GroupedMLPSubmodules(**parts))
    return experts.TEGroupedMLP, experts.MLPSubmodules(**parts)


@contextmanager
def grouped_experts() -> Iterator[None]:
    """Build `TEGroupedMLP` with the stand-in where the local spec has sequential experts."""
    with patch.object(LocalSpecProvider, "grouped_mlp_modules", _modules):
        yield
