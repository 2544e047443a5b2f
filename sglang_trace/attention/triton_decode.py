"""Decode with the Triton loop, one query token a request: for hosts without a CUDA compiler.

Requests are not split over the GPU, so long ones are slow; `decode.PagedDecode` is the fast way and
computes the same.

Shape legend: B requests, M most requests, P slots of the pool, HQ query heads, H KV heads, D head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trace.attention.extend import check_heads, extend_attention


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
        k_codes_PHd: Tensor,
        k_scales_PHb: Tensor,
        v_codes_PHd: Tensor,
        v_scales_PHb: Tensor,
        *,
        table_RT: Tensor,
        rows_B: Tensor,
        lengths_B: Tensor,
        page_size: int,
        k_scale: float,
        v_scale: float,
        sm_scale: float,
        out_BHD: Tensor,
    ) -> Tensor:
        """Attend with one token of every request to all its keys; arguments as `PagedDecode`'s."""
        batch = len(q_BHD)
        return extend_attention(
            q_BHD,
            k_codes_PHd,
            k_scales_PHb,
            v_codes_PHd,
            v_scales_PHb,
            table_RE=table_RT,
            rows_B=rows_B,
            lengths_B=lengths_B,
            starts_B=self._starts_M[:batch],
            new_B=self._ones_M[:batch],
            most_new=1,
            page_size=page_size,
            k_scale=k_scale,
            v_scale=v_scale,
            sm_scale=sm_scale,
            out_THD=out_BHD,
        )
