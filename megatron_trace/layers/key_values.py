"""FP4 keys and values of one attention layer.

Shape legend: S sequence, B batch, T packed tokens, G key/value heads of this rank, D head size,
R = S * B or T rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.layout import ModelShape, Site, TensorSlice
from megatron_trace.context import current_scope
from megatron_trace.parallel import TensorParallel
from megatron_trace.rounding.rows import round_rows


@dataclass(frozen=True)
class KeyValues:
    """K and V of attention layer `layer`, as marked by `enable_fp4`; `heads` splits the heads."""

    layer: int
    shape: ModelShape
    heads: TensorParallel

    @property
    def tensor_slice(self) -> TensorSlice:
        """What of K and V this rank computes."""
        return TensorSlice(heads=self.heads.part_of(self.shape.num_kv_heads))

    def round_key_value(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Round both as the rollout's KV cache stores them: [S, B, G, D] or [T, G, D]."""
        return self._rounded(Site.K, key), self._rounded(Site.V, value)

    def _rounded(self, site: Site, states: Tensor) -> Tensor:
        flat_RN = states.reshape(-1, states.shape[-2] * states.shape[-1])
        scope = current_scope()
        if scope.micro_batch is None:
            return round_rows(flat_RN, _one(states.device), None).view_as(states)
        scope.micro_batch.check_shape(self.shape)
        # Sequence parallelism ends before attention: every rank has all tokens, and its heads.
        tokens = self.heads.tokens_of(scope.micro_batch.num_tokens, len(flat_RN))
        rows = scope.micro_batch.site_rows(site, self.layer, tokens, scope.counting)
        own_scale = scope.micro_batch.kv_global_scale(site, self.layer)
        first = self.heads.rank * flat_RN.shape[-1]
        return round_rows(flat_RN, own_scale, rows, first).view_as(states)


def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)
