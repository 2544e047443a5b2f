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
from megatron_trace.rounding.kept_weights import KeptRounding


@dataclass(frozen=True)
class ExpertWeight:
    """The weight of an expert's linear layer.

    projections    matrices stacked along the rows: 2 for gate and up, 1 for down; every one has a
                   tensor scale of its own, as in the rollout
    dtype          the dtype in which the rollout holds the weights before it quantizes them
    shard_group    the ranks that share the matrix; None if this rank holds all of it
    """

    projections: int
    dtype: torch.dtype
    shard_group: ProcessGroup | None

    @cached_property
    def kept(self) -> KeptRounding:
        """The rounded weight of the last forward."""
        return KeptRounding(self.shard_group)

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return the weight that the rollout computes with, gradient straight through."""
        return straight_through(weight, self.kept.of(weight, self._rounded))

    def _rounded(self, weight: Tensor) -> Tensor:
        matrices = weight.to(self.dtype).chunk(self.projections)
        quantized = [quantize_shard(matrix, self.shard_group) for matrix in matrices]
        return torch.cat([fp4.dequantize(weight.dtype) for fp4 in quantized])


def quantize_shard(w_OI: Tensor, group: ProcessGroup | None) -> Fp4Tensor:
    """Quantize this rank's part of a matrix with the whole matrix's tensor scale."""
    if group is None:
        return quantize_weight(w_OI)
    amax = w_OI.abs().amax().to(torch.float32)
    all_reduce(amax, ReduceOp.MAX, group)
    return quantize_nvfp4(w_OI, tensor_scale(amax))
