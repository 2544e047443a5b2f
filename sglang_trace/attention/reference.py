"""Dequantize with `bridge.fp4.nvfp4`, then attend in float32: what both kernels are tested against.

Shape legend: T query tokens of all requests, B requests, N keys of one request, P slots of the
pool, HQ query heads, H KV heads, D head size, d = D / 2 bytes of code words, b = D / 16 scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.fp4.nvfp4 import NVFP4_BLOCK, Fp4Tensor, unpack_nibbles
from sglang_trace.attention.paged_kv import PagedKV


def kv_slots(kv: PagedKV, request: int) -> Tensor:
    """Return the KV slots of a request's keys in the order of their positions: int64 [N]."""
    length, row = int(kv.lengths_B[request]), int(kv.rows_B[request])
    position_N = torch.arange(length, device=kv.table_RE.device)
    page_N = kv.table_RE[row, position_N // kv.page_size].long()
    return page_N * kv.page_size + position_N % kv.page_size


def keys_and_values(kv: PagedKV, request: int) -> tuple[Tensor, Tensor]:
    """Return a request's keys and values: float32 [N, H, D]."""
    slots_N = kv_slots(kv, request)
    pairs = (
        (kv.k_codes_PHd, kv.k_scales_PHb, kv.k_scale),
        (kv.v_codes_PHd, kv.v_scales_PHb, kv.v_scale),
    )
    k_NHD, v_NHD = (_dequantize(codes[slots_N], scales[slots_N], s) for codes, scales, s in pairs)
    return k_NHD, v_NHD


def attend(q_THD: Tensor, kv: PagedKV, new_B: list[int], sm_scale: float) -> Tensor:
    """Attend with the last `new_B` tokens of every request to all keys up to their own: float32.

    Args:
        q_THD: [T, HQ, D] of any float dtype, the requests' tokens after each other.
        kv: what is stored, the query tokens' own keys and values included.
        new_B: query tokens of each request; their sum is T.
        sm_scale: factor of the scores.

    Returns:
        float32 [T, HQ, D].
    """
    pieces = []
    for request, q_nQD in enumerate(torch.split(q_THD.float(), new_B)):
        k_NHD, v_NHD = keys_and_values(kv, request)
        group = q_nQD.shape[1] // k_NHD.shape[1]
        k_QND, v_QND = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (k_NHD, v_NHD))
        score_QnN = q_nQD.transpose(0, 1) @ k_QND.transpose(1, 2) * sm_scale
        length, new = len(k_NHD), len(q_nQD)
        key_N = torch.arange(length, device=q_THD.device)
        later_nN = key_N > key_N[length - new :, None]
        weight_QnN = score_QnN.masked_fill(later_nN, -torch.inf).softmax(dim=-1)
        pieces.append((weight_QnN @ v_QND).transpose(0, 1))
    return torch.cat(pieces)


def _dequantize(codes_NHd: Tensor, scales_NHb: Tensor, scale: float) -> Tensor:
    scale_1 = torch.tensor(scale, dtype=torch.float32, device=codes_NHd.device)
    return Fp4Tensor(unpack_nibbles(codes_NHd), scales_NHb, scale_1, NVFP4_BLOCK).dequantize()
