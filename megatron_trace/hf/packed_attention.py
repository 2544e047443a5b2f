"""Core attention for packed sequences and context parallelism without Transformer Engine.

Megatron's own `DotProductAttention` refuses both. This module runs torch's scaled-dot-product
attention once per sequence; with context parallelism every rank gathers all keys and values first.
Padded batches on one context rank go to Megatron's code.

Shape legend: T packed tokens (this rank's), S all tokens of a sequence or pack, B batch, N query
heads, G key/value heads (both of this rank), D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_trace.parallel import ContextParallel


class PackedDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Causal `DotProductAttention` that also takes packed sequences and context parallelism."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(replace(config, context_parallel_size=1), *args, **options)
        self.config = config
        self._context = ContextParallel.current()

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
        """Attend; with `packed_seq_params` query is [T, N, D], key and value are [T, G, D].

        Without, all are [T, B, heads, D]; over context ranks the mask is causal whatever is given.
        """
        if packed_seq_params is None and self._context.size == 1:
            padded: Tensor = super().forward(query, key, value, attention_mask, **options)
            return padded
        if packed_seq_params is not None:
            bounds = _sequence_bounds(packed_seq_params)
            return self._packed(query, key, value, bounds).flatten(1)
        whole = [0, len(query) * self._context.size]
        batch = [
            self._packed(query[:, b], key[:, b], value[:, b], whole) for b in range(query.shape[1])
        ]
        return torch.stack(batch, dim=1).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int]) -> Tensor:
        """Attend within every sequence: [T, N, D]."""
        if self._context.size == 1:
            parts = [
                _causal(query[start:stop], key[start:stop], value[start:stop], self.softmax_scale)
                for start, stop in pairwise(bounds)
            ]
        else:
            parts = list(self._over_context_ranks(query, key, value, bounds))
        return torch.cat(parts)

    def _over_context_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int]
    ) -> Iterator[Tensor]:
        size = self._context.size
        everyone = torch.cat([ContextParallel(rank, size).kept(bounds) for rank in range(size)])
        order_S = torch.argsort(everyone)
        group = parallel_state.get_context_parallel_group()
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), group=group)[order_S]
            for x in (key, value)
        )
        kept_T = self._context.kept(bounds)
        for start, stop in pairwise(bounds):
            mine = slice(start // size, stop // size)
            places_T = kept_T[mine] - start
            mask_TS = places_T[:, None] >= torch.arange(stop - start)
            of = slice(start, stop)
            yield _causal(query[mine], key[of], value[of], self.softmax_scale, mask_TS)


def _sequence_bounds(packed: PackedSeqParams) -> list[int]:
    cu_seqlens = packed.cu_seqlens_q_padded
    bounds: list[int] = (packed.cu_seqlens_q if cu_seqlens is None else cu_seqlens).tolist()
    return bounds


def _causal(
    q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, mask_TS: Tensor | None = None
) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TND, k_TGD, v_TGD))
    out = torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask_TS,
        is_causal=mask_TS is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)
