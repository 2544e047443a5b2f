"""Prefill and chunked prefill over an NVFP4 KV cache: dequantize, then torch's flash attention.

Prefill computes so much with every key that BF16 tensor cores at full speed are worth more than
keys that stay small: what the running requests have in the pool is written to a BF16 scratch, exact
(`kernels.kv_dequantize`), a bounded piece at a time, and FlashAttention-2 of torch reads that. The
global scale of the keys is a factor of the scores. That of the values is one of the output, which
is in BF16 by then: FP32 multiplies, and the product is rounded once more unless the scale is a
power of two. The attention's weights are BF16, as in every flash attention on BF16 values.

Shape legend: T query tokens of all requests, B requests, S = B + 1, P slots of the pool, HQ query
heads, H KV heads, N keys of a piece, h and hq KV and query heads of a piece, n its query tokens, D
head size, d = D / 2, b = D / 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_trace.attention.extend_pieces import Piece
from sglang_trace.attention.paged_kv import PagedKV
from sglang_trace.kernels.kv.dequantize import dequantize_keys_and_values


def extend_flash(
    q_THD: Tensor,
    kv: PagedKV,
    pieces: list[Piece],
    *,
    sm_scale: float,
    out_THD: Tensor,
) -> Tensor:
    """Attend with the last tokens of every request to all its keys up to their own.

    The query tokens' own keys and values are read from the pool like all others. Nothing waits for
    the device. The scratch comes from torch's allocator, one piece's at a time.

    Args:
        q_THD: BF16 [T, HQ, D], contiguous along D; head h reads KV head h // (HQ / H).
        kv: keys and values, those of the query tokens included.
        pieces: of `pieces_of` for these requests.
        sm_scale: factor of the scores.
        out_THD: BF16 [T, HQ, D], written.

    Returns:
        `out_THD`.
    """
    group = q_THD.shape[1] // kv.heads
    for piece in pieces:
        q_heads = slice(piece.heads.start * group, piece.heads.stop * group)
        k_NhD, v_NhD = _dequantized(kv, piece)
        found_nhD = flash_attention(
            q_THD[piece.tokens, q_heads], k_NhD, v_NhD, piece, sm_scale * kv.k_scale
        )
        # The scratch, before the next piece asks for its own.
        del k_NhD, v_NhD
        torch.mul(found_nhD, kv.v_scale, out=out_THD[piece.tokens, q_heads])
    return out_THD


def _dequantized(kv: PagedKV, piece: Piece) -> tuple[Tensor, Tensor]:
    """Return keys and values of a piece, without their global scales: BF16 [N, h, D] each."""
    shape = piece.keys, piece.heads.stop - piece.heads.start, 2 * kv.k_codes_PHd.shape[2]
    k_NhD, v_NhD = (
        torch.empty(shape, dtype=torch.bfloat16, device=kv.k_codes_PHd.device) for _ in range(2)
    )
    dequantize_keys_and_values(
        kv.k_codes_PHd,
        kv.k_scales_PHb,
        kv.v_codes_PHd,
        kv.v_scales_PHb,
        table_RE=kv.table_RE,
        rows_B=kv.rows_B[piece.requests],
        starts_S=piece.k_starts_S,
        max_keys=piece.max_keys,
        heads=piece.heads,
        page_size=kv.page_size,
        k_NhD=k_NhD,
        v_NhD=v_NhD,
    )
    return k_NhD, v_NhD


def flash_attention(
    q_nhD: Tensor, k_NhD: Tensor, v_NhD: Tensor, piece: Piece, sm_scale: float
) -> Tensor:
    """Return the causal attention of a piece's query tokens, the last of their requests' keys.

    The operator is the one beneath torch's public functions (torch 2.11 to 2.13 have the arguments
    used here): `varlen_attn` of 2.11 documents no grouped heads, and
    `scaled_dot_product_attention` falls back to kernels that hold every score in memory, or that
    plan anew for every length. Its causal mask is aligned at the last key.

    Args:
        q_nhD: BF16 [n, hq, D].
        k_NhD, v_NhD: BF16 [N, h, D], the requests' after each other.
        piece: whose tokens and keys they are.
        sm_scale: factor of the scores.

    Returns:
        BF16 [n, hq, D].
    """
    flash = torch.ops.aten._flash_attention_forward
    most = piece.max_new, piece.max_keys
    dropout, causal, debug = 0.0, True, False
    if len(piece.q_starts_S) == 2:
        # One request: the form that splits long keys over the GPU.
        dense = q_nhD[None], k_NhD[None], v_NhD[None]
        found: Tensor = flash(*dense, None, None, *most, dropout, causal, debug, scale=sm_scale)[0]
        return found[0]
    starts = piece.q_starts_S, piece.k_starts_S
    found = flash(q_nhD, k_NhD, v_NhD, *starts, *most, dropout, causal, debug, scale=sm_scale)[0]
    return found
