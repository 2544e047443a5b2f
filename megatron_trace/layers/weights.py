"""Expert weights rounded by the rollout's own function, and their digests.

Shape legend: O, I out and in features of one projection (this rank's part).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from bridge.fp4.guided_rounding import straight_through
from bridge.fp4.nvfp4 import Fp4Tensor, quantize_nvfp4, quantize_weight, tensor_scale
from megatron_trace.rounding.expert_group import ExpertGroup
from megatron_trace.rounding.kept_weights import KeptRounding
from megatron_trace.rounding.main_grad import straight_through_all


@dataclass(frozen=True)
class ExpertWeight:
    """The weight of an expert's linear layer.

    group    the same layer of all local experts, which a GPU rounds together
    index    which of the group's weights this one is
    """

    group: ExpertGroup
    index: int

    @cached_property
    def kept(self) -> KeptRounding:
        """The rounded weight of the last forward."""
        return KeptRounding(self.group.shard_group)

    def round_weight(self, weight: Tensor, *, alone: bool = False) -> Tensor:
        """Return the weight that the rollout computes with, gradient straight through.

        Args:
            weight: the parameter.
            alone: do not read the other experts' weights.
        """
        if not alone and self.group.takes(weight, self.index):
            return straight_through(weight, self.group.rounded()[self.index])
        return straight_through(weight, self.rounded_alone(weight))

    def rounded_alone(self, weight: Tensor) -> Tensor:
        """Return the rounded weight where no kernel rounds the group's: no gradient."""
        return self.kept.of(weight, self._rounded)

    def free(self) -> int:
        """Let go of the rounded weight, and of all of its group; return their bytes."""
        return self.group.free() + self.kept.free()

    def _rounded(self, weight: Tensor) -> Tensor:
        matrices = weight.to(self.group.rollout_dtype).chunk(self.group.projections)
        quantized = [quantize_shard(matrix, self.group.shard_group) for matrix in matrices]
        return torch.cat([fp4.dequantize(weight.dtype) for fp4 in quantized])


@dataclass(frozen=True)
class GroupedWeights:
    """The weights of a grouped linear layer, which multiplies all local experts in one call.

    group        the weights
    fuses_grads  whether its backward adds the weights' gradients to `main_grad` itself
    """

    group: ExpertGroup
    fuses_grads: bool

    @cached_property
    def each(self) -> tuple[ExpertWeight, ...]:
        """The weights one by one, for a device without kernels."""
        return tuple(ExpertWeight(self.group, index) for index in range(len(self.group.weights)))

    def round_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights that the rollout computes with, gradient straight through."""
        if all(self.group.takes(weight, index) for index, weight in enumerate(weights)):
            rounded: Sequence[Tensor] = self.group.rounded().unbind()
        else:
            pairs = zip(self.each, weights, strict=True)
            rounded = [site.rounded_alone(weight).view_as(weight) for site, weight in pairs]
        return straight_through_all(weights, rounded, fuses_grads=self.fuses_grads)

    def free(self) -> int:
        """Let go of the rounded weights; return their bytes."""
        return self.group.free() + sum(site.kept.free() for site in self.each)


def quantize_shard(w_OI: Tensor, group: ProcessGroup | None) -> Fp4Tensor:
    """Quantize this rank's part of a matrix with the whole matrix's tensor scale."""
    if group is None:
        return quantize_weight(w_OI)
    amax = w_OI.abs().amax().to(torch.float32)
    all_reduce(amax, ReduceOp.MAX, group)
    return quantize_nvfp4(w_OI, tensor_scale(amax))
