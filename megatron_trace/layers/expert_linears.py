"""The linear layers of a MoE layer's local experts: one by one, or all in one grouped layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn
from torch.distributed import ProcessGroup

from megatron_trace.layers.experts import Fc2Input
from megatron_trace.layers.weights import ExpertWeight, GroupedWeights
from megatron_trace.rounding.expert_group import ExpertGroup

# A module, the attribute that marks it, and what the hooks find there.
Mark = tuple[nn.Module, str, Any]


class ExpertLinears:
    """What rounds the linear layers of `SequentialMLP` or `TEGroupedMLP`."""

    def __init__(self, experts: Any, gated: bool, rollout_dtype: torch.dtype) -> None:
        self._experts = experts
        self._projections = 2 if gated else 1
        self._rollout_dtype = rollout_dtype

    @property
    def sees_all_rows(self) -> bool:
        """Whether fc2's input has the rows of all experts and alone says what fc2 puts out.

        It does not where it is recomputed apart from the router, or where fc2 adds a bias.
        """
        recomputed = getattr(self._experts, "activation_recompute", False)
        return self.are_grouped and not recomputed and not self._experts.config.add_bias_linear

    @property
    def are_grouped(self) -> bool:
        """Whether one layer multiplies all experts."""
        return not isinstance(self._experts, SequentialMLP)

    @cached_property
    def groups(self) -> tuple[ExpertGroup, ExpertGroup]:
        """The weights of fc1 and of fc2, of all local experts."""
        return self._group("linear_fc1", self._projections), self._group("linear_fc2", 1)

    def marks(self) -> Iterator[Mark]:
        """Yield what marks the experts."""
        if isinstance(self._experts, SequentialMLP):
            yield from self._marks_one_by_one(self._experts)
        else:
            yield from self._marks_grouped()

    def _marks_one_by_one(self, experts: SequentialMLP) -> Iterator[Mark]:
        fc1, fc2 = self.groups
        for index, expert in enumerate(experts.local_experts):
            yield expert, "trace_fc2_input", Fc2Input(index, self._shard_group, self.groups)
            yield expert.linear_fc1, "trace_weight", ExpertWeight(fc1, index)
            yield expert.linear_fc2, "trace_weight", ExpertWeight(fc2, index)

    def _marks_grouped(self) -> Iterator[Mark]:
        yield self._experts, "trace_fc2_input", Fc2Input(None, self._shard_group, self.groups)
        for name, group in zip(("linear_fc1", "linear_fc2"), self.groups, strict=True):
            linear = getattr(self._experts, name)
            yield linear, "trace_weights", GroupedWeights(group, linear.fuse_wgrad_accumulation)

    def _group(self, name: str, projections: int) -> ExpertGroup:
        weights = list(weights_of(self._experts, name))
        return ExpertGroup(weights, projections, self._rollout_dtype, self._shard_group)

    @property
    def _shard_group(self) -> ProcessGroup | None:
        """The ranks that share every weight; None if this rank holds all of it."""
        group: Any = self._experts.tp_group
        return group if group.size() > 1 else None


def weights_of(experts: nn.Module, name: str) -> Iterator[nn.Parameter]:
    """Yield the weights [O, I] of one linear layer of every local expert."""
    if isinstance(experts, SequentialMLP):
        yield from (getattr(expert, name).weight for expert in experts.local_experts)
    else:
        linear = getattr(experts, name)
        yield from (getattr(linear, f"weight{index}") for index in range(linear.num_gemms))
