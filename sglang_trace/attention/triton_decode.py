"""Decode with the Triton loop, one query token per request: for hosts without a CUDA compiler.

Requests are not split over the GPU, so long ones are slow; `decode.PagedDecode` is the fast way and
computes the same.

Shape legend: B requests, M most requests, P slots of the pool, HQ query heads, H KV heads, D head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trace.attention.extend import check_heads, extend_attention
from sglang_trace.attention.paged_kv import PagedKV


class TritonDecode:
    """Holds the little that is not in a call; can be part of a CUDA graph."""

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_batch: int,
        device: torch.device | str,
    ) -> None:
        check_heads(num_q_heads, num_kv_heads, head_dim)
        self._starts_M = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._ones_M = torch.ones_like(self._starts_M)

    def __call__(
        self,
        q_BHD: Tensor,
        kv: PagedKV,
        *,
        sm_scale: float,
        out_BHD: Tensor,
    ) -> Tensor:
        """Attend with one token of every request to all its keys; arguments as `PagedDecode`'s."""
        batch = len(q_BHD)
        return extend_attention(
            q_BHD,
            kv,
            starts_B=self._starts_M[:batch],
            new_B=self._ones_M[:batch],
            max_new=1,
            sm_scale=sm_scale,
            out_THD=out_BHD,
        )
