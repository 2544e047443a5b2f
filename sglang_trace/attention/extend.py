"""Attention of requests' last tokens over an NVFP4 KV cache: a FlashAttention-2 loop in Triton.

Decode uses it where there is no CUDA compiler (`triton_decode`). Prefill does not, because the loop
dequantizes a key again for every tile of queries: `extend_flash` does that once.

The keys of a tile are taken apart in registers, so only the slots of running requests are read, and
those once for all query heads of a group. A byte holds two neighbours of a head, so even and odd
columns are multiplied apart: a score is the sum of two products, an output has two halves.

Operands are FP16. Code word * block scale is exact there (at most 6 significant bits, and a
multiple of 2^-24 even with the factor 2^-14 below), and so is a query once a power of two has
brought its row into range; the weights keep 11 bits instead of BF16's 8.

Source of the loop: FlashAttention-2, arXiv 2307.08691, algorithm 1.

Shape legend: T query tokens of all requests, B requests, P slots of the pool, HQ query heads, H KV
heads, G = HQ / H query heads of a group, D head size, d = D / 2, b = D / 16; in a program M rows
(token, head of the group) and N keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.triton_arithmetic import bits_of, float_of, round_bf16, upcast
from sglang_trace.attention.paged_kv import PagedKV
from sglang_trace.kernels.kv.values import CODE_FACTOR, stored_values

HEAD_DIMS = (64, 128, 256)
KEYS = 64
_LOG2E = 1.4426950408889634


def extend_attention(
    q_THD: Tensor,
    kv: PagedKV,
    *,
    starts_B: Tensor,
    new_B: Tensor,
    max_new: int,
    sm_scale: float,
    out_THD: Tensor,
) -> Tensor:
    """Attend with the last `new_B` tokens of every request to all its keys up to their own.

    The query tokens' own keys and values are read from the pool like all others. Nothing waits for
    the device, and nothing is allocated.

    Args:
        q_THD: BF16 [T, HQ, D], contiguous along heads and D.
        kv: keys and values, those of the query tokens included.
        starts_B: int32 or int64 [B], first query token of each request.
        new_B: int32 or int64 [B], query tokens of each request.
        max_new: at least the largest of `new_B`, known to the host.
        sm_scale: factor of the scores.
        out_THD: BF16 [T, HQ, D], written.

    Returns:
        `out_THD`.

    Raises:
        ValueError: for another head size.
    """
    q_heads, size = q_THD.shape[1:]
    heads = kv.heads
    check_heads(q_heads, heads, size)
    assert q_THD.dtype == out_THD.dtype == torch.bfloat16
    codes_and_scales = kv.k_codes_PHd, kv.k_scales_PHb, kv.v_codes_PHd, kv.v_scales_PHb
    for pool, width in zip(codes_and_scales, (size // 2, size // 16) * 2, strict=True):
        assert pool.dtype == torch.uint8
        assert pool.is_contiguous()
        assert pool.shape[2] == width
    assert q_THD.stride()[1:] == out_THD.stride()[1:] == (size, 1)
    assert kv.table_RE.stride(1) == 1
    if max_new == 0 or len(kv.rows_B) == 0:
        return out_THD
    group = q_heads // heads
    tile = _tile_rows(max_new * group, size)
    _extend[(triton.cdiv(max_new * group, tile), heads, len(kv.rows_B))](
        q_THD,
        *codes_and_scales,
        kv.table_RE,
        kv.rows_B,
        kv.lengths_B,
        starts_B,
        new_B,
        out_THD,
        q_THD.stride(0),
        out_THD.stride(0),
        kv.table_RE.stride(0),
        sm_scale * kv.k_scale * CODE_FACTOR * _LOG2E,
        kv.v_scale * CODE_FACTOR,
        heads,
        group,
        kv.page_size,
        SIZE=size,
        TILE_M=tile,
        TILE_N=KEYS,
        num_warps=4 if tile == _MIN_ROWS else 8,
        num_stages=2,
    )
    return out_THD


def check_heads(q_heads: int, heads: int, size: int) -> None:
    """Refuse what the kernel does not compute.

    Raises:
        ValueError: naming it.
    """
    if size not in HEAD_DIMS:
        raise ValueError(
            f"FP4 attention has heads of {HEAD_DIMS}, not {size}: use a BF16 KV cache."
        )
    if q_heads % heads:
        raise ValueError(f"{heads} KV heads do not divide {q_heads} query heads.")


# The least that tensor cores multiply.
_MIN_ROWS = 16


def _tile_rows(rows: int, size: int) -> int:
    """Return the rows of a tile: two sizes for each head size, so that few kernels are compiled."""
    if rows <= _MIN_ROWS:
        return _MIN_ROWS
    # Twice 64 rows of 256 columns do not fit into the registers of eight warps.
    return 64 if size > 128 else 128


# One kernel for all numbers of heads: they only place a row.
@triton.jit(do_not_specialize=["heads", "group"])
def _extend(
    q,
    k_codes,
    k_scales,
    v_codes,
    v_scales,
    table,
    rows,
    lengths,
    starts,
    news,
    out,
    q_token,
    out_token,
    table_row,
    score_scale,
    value_scale,
    heads,
    group,
    page_size,
    SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    request = tl.program_id(2)
    head = tl.program_id(1)
    new = tl.load(news + request).to(tl.int32)
    # The last rows see the most keys: begin with them.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M
    if first >= new * group:
        return
    length = tl.load(lengths + request).to(tl.int32)
    row_M = first + tl.arange(0, TILE_M)
    token_M = row_M // group
    live_M = token_M < new
    position_M = length - new + token_M
    end = tl.minimum(length - new + (first + TILE_M - 1) // group + 1, length)

    half = tl.arange(0, SIZE // 2)
    token_at_M = (tl.load(starts + request) + token_M).to(tl.int64)
    head_M = head * group + row_M % group
    q_at = q + (token_at_M * q_token + head_M * SIZE)[:, None] + 2 * half[None, :]
    even_q = upcast(tl.load(q_at, mask=live_M[:, None], other=0.0))
    odd_q = upcast(tl.load(q_at + 1, mask=live_M[:, None], other=0.0))
    most_M = tl.maximum(tl.max(tl.abs(even_q), axis=1), tl.max(tl.abs(odd_q), axis=1))
    # 2^7 over the largest number's power of two; it and its inverse are normal numbers.
    field_M = tl.minimum(tl.maximum(261 - ((bits_of(most_M) >> 23) & 0xFF), 2), 252)
    into_range_M = float_of(field_M << 23)
    score_scale_M = float_of((254 - field_M) << 23) * score_scale
    even_q = (even_q * into_range_M[:, None]).to(tl.float16)
    odd_q = (odd_q * into_range_M[:, None]).to(tl.float16)

    pages = table + tl.load(rows + request).to(tl.int64) * table_row
    most_score_M = tl.full((TILE_M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((TILE_M,), tl.float32)
    even_out = tl.zeros((TILE_M, SIZE // 2), tl.float32)
    odd_out = tl.zeros((TILE_M, SIZE // 2), tl.float32)
    for begin in range(0, end, TILE_N):
        key_N = begin + tl.arange(0, TILE_N)
        live_N = key_N < end
        page_N = tl.load(pages + key_N // page_size, mask=live_N, other=0).to(tl.int64)
        at_N = (page_N * page_size + key_N % page_size) * heads + head
        even_k, odd_k = stored_values(k_codes, k_scales, at_N, live_N, SIZE, TILE_N)
        score = tl.dot(even_q, tl.trans(even_k))
        score = tl.dot(odd_q, tl.trans(odd_k), score) * score_scale_M[:, None]
        seen = (key_N[None, :] <= position_M[:, None]) & live_N[None, :]
        score = tl.where(seen, score, float("-inf"))
        most_M = tl.maximum(most_score_M, tl.max(score, axis=1))
        weight = tl.exp2(score - most_M[:, None])
        keep_M = tl.exp2(most_score_M - most_M)
        sum_M = sum_M * keep_M + tl.sum(weight, axis=1)
        most_score_M = most_M
        even_v, odd_v = stored_values(v_codes, v_scales, at_N, live_N, SIZE, TILE_N)
        weight = weight.to(tl.float16)
        even_out = tl.dot(weight, even_v, even_out * keep_M[:, None])
        odd_out = tl.dot(weight, odd_v, odd_out * keep_M[:, None])

    factor_M = value_scale / sum_M
    out_at = out + (token_at_M * out_token + head_M * SIZE)[:, None] + 2 * half[None, :]
    tl.store(out_at, round_bf16(even_out * factor_M[:, None]), mask=live_M[:, None])
    tl.store(out_at + 1, round_bf16(odd_out * factor_M[:, None]), mask=live_M[:, None])
