"""Expert weights rounded by the rollout's own function, and their digests.

Shape legend: O, I out and in features of one projection (this rank's part).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from bridge.fp4.guided_rounding import straight_through
from bridge.fp4.nvfp4 import Fp4Tensor, quantize_nvfp4, quantize_weight, tensor_scale
from megatron_trace.rounding.expert_group import ExpertGroup
from megatron_trace.rounding.kept_weights import KeptRounding


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

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return the weight that the rollout computes with, gradient straight through."""
        if self.group.takes(weight, self.index):
            return straight_through(weight, self.group.rounded()[self.index])
        return straight_through(weight, self.kept.of(weight, self._rounded))

    def free(self) -> int:
        """Let go of the rounded weight, and of all of its group; return their bytes."""
        return self.group.free() + self.kept.free()

    def _rounded(self, weight: Tensor) -> Tensor:
        matrices = weight.to(self.group.rollout_dtype).chunk(self.group.projections)
        quantized = [quantize_shard(matrix, self.group.shard_group) for matrix in matrices]
        return torch.cat([fp4.dequantize(weight.dtype) for fp4 in quantized])


def quantize_shard(w_OI: Tensor, group: ProcessGroup | None) -> Fp4Tensor:
    """Quantize this rank's part of a matrix with the whole matrix's tensor scale."""
    if group is None:
        return quantize_weight(w_OI)
    amax = w_OI.abs().amax().to(torch.float32)
    all_reduce(amax, ReduceOp.MAX, group)
    return quantize_nvfp4(w_OI, tensor_scale(amax))
