"""Torch's flash attention exists on GPUs alone; elsewhere its other attention takes its place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sglang_trace.attention.extend_pieces import Piece


def attention_of_torch(
    q_nhD: Tensor, k_NhD: Tensor, v_NhD: Tensor, piece: Piece, sm_scale: float
) -> Tensor:
    """One request after the other, in FP32, as the starts on the device divide them."""
    new, lengths = piece.q_starts_S.diff().tolist(), piece.k_starts_S.diff().tolist()
    assert (max(new), max(lengths)) == (piece.max_new, piece.max_keys)
    assert piece.q_starts_S.dtype == piece.k_starts_S.dtype == torch.int32
    assert q_nhD.dtype == k_NhD.dtype == v_NhD.dtype == torch.bfloat16
    pieces = []
    for q, k, v in zip(q_nhD.split(new), k_NhD.split(lengths), v_NhD.split(lengths), strict=True):
        found = scaled_dot_product_attention(
            *(x.float().transpose(0, 1)[None] for x in (q, k, v)),
            attn_mask=causal_lower_right(len(q), len(k)),
            scale=sm_scale,
            enable_gqa=True,
        )
        pieces.append(found[0].transpose(0, 1).bfloat16())
    return torch.cat(pieces)
