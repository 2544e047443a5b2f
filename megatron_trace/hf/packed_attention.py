"""Core attention for packed sequences without Transformer Engine.

Megatron's own `DotProductAttention` refuses packed (THD) input. This module adds it by running
torch's scaled-dot-product attention once a sequence; padded batches go to Megatron's code.

Shape legend: T packed tokens, N query heads, G key/value heads (both of this rank), D head size.
"""

from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


class PackedDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Causal `DotProductAttention` that also takes packed sequences."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Tensor:
        """Attend; with `packed_seq_params` query is [T, N, D], key and value are [T, G, D]."""
        if packed_seq_params is None:
            padded: Tensor = super().forward(query, key, value, attention_mask, **options)
            return padded
        bounds = _sequence_bounds(packed_seq_params)
        out_TND = torch.cat(
            [
                _causal(query[start:stop], key[start:stop], value[start:stop], self.softmax_scale)
                for start, stop in pairwise(bounds)
            ]
        )
        return out_TND.flatten(1)


def _sequence_bounds(packed: PackedSeqParams) -> list[int]:
    cu_seqlens = packed.cu_seqlens_q_padded
    bounds: list[int] = (packed.cu_seqlens_q if cu_seqlens is None else cu_seqlens).tolist()
    return bounds


def _causal(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TND, k_TGD, v_TGD))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)
