"""Keys and values of some requests, out of the FP4 KV pool, as BF16 in the order of positions.

Code word * block scale is exact in BF16: at most 6 significant bits, and from 2^-10 to 2688. The
global scales stay out.

Shape legend: P slots of the pool, H KV heads, B requests, S = B + 1, R rows of the table and E its
entries, N keys of all requests after each other, h KV heads asked for, D head size, d = D / 2,
b = D / 16; in a program L rows (key, head).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_trace.kernels.kv.values import as_bf16, stored_values

# Four warps hold this many bytes of code words, 32 a thread.
_TILE_BYTES = 4096
# Enough to fill any GPU with one request; a program goes on to the tile this far behind its last.
_MAX_PROGRAMS = 2048


def dequantize_keys_and_values(
    k_codes_PHd: Tensor,
    k_scales_PHb: Tensor,
    v_codes_PHd: Tensor,
    v_scales_PHb: Tensor,
    *,
    table_RE: Tensor,
    rows_B: Tensor,
    starts_S: Tensor,
    max_keys: int,
    heads: slice,
    page_size: int,
    k_NhD: Tensor,
    v_NhD: Tensor,
) -> None:
    """Write code word * block scale of every key and value of the requests.

    Nothing waits for the device, and nothing is allocated.

    Args:
        k_codes_PHd, v_codes_PHd: uint8 [P, H, D/2], two code words a byte.
        k_scales_PHb, v_scales_PHb: uint8 [P, H, D/16], E4M3.
        table_RE: int32 [R, E]: row, token // page_size -> page.
        rows_B: int32 or int64 [B], the row of each request.
        starts_S: int32 [B + 1], where each request's keys begin in the output, and N.
        max_keys: at least the keys of the longest request, known to the host.
        heads: the KV heads to write.
        page_size: slots of a page.
        k_NhD, v_NhD: BF16 [N, h, D], contiguous, written.
    """
    size = k_NhD.shape[2]
    for pool in (k_codes_PHd, k_scales_PHb, v_codes_PHd, v_scales_PHb):
        assert pool.dtype == torch.uint8
        assert pool.is_contiguous()
    assert k_codes_PHd.shape[2] == v_codes_PHd.shape[2] == size // 2
    assert k_scales_PHb.shape[2] == v_scales_PHb.shape[2] == size // 16
    for out in (k_NhD, v_NhD):
        assert out.dtype == torch.bfloat16
        assert out.is_contiguous()
        assert out.shape[1] == heads.stop - heads.start
    assert table_RE.stride(1) == 1
    assert len(starts_S) == len(rows_B) + 1
    tile = 2 * _TILE_BYTES // size
    tiles = triton.cdiv(max_keys * k_NhD.shape[1], tile)
    _dequantize[(min(tiles, _MAX_PROGRAMS), len(rows_B))](
        k_codes_PHd,
        k_scales_PHb,
        v_codes_PHd,
        v_scales_PHb,
        table_RE,
        rows_B,
        starts_S,
        k_NhD,
        v_NhD,
        table_RE.stride(0),
        k_codes_PHd.shape[1],
        heads.start,
        k_NhD.shape[1],
        page_size,
        SIZE=size,
        TILE=tile,
        num_warps=4,
    )


# One kernel for all numbers of heads and for every place of `rows` and `starts` in their buffers.
@triton.jit(do_not_specialize=["rows", "starts", "heads", "first_head", "heads_here"])
def _dequantize(
    k_codes,
    k_scales,
    v_codes,
    v_scales,
    table,
    rows,
    starts,
    keys,
    values,
    table_row,
    heads,
    first_head,
    heads_here,
    page_size,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(1)
    start = tl.load(starts + request).to(tl.int64)
    count = (tl.load(starts + request + 1).to(tl.int32) - start.to(tl.int32)) * heads_here
    pages = table + tl.load(rows + request).to(tl.int64) * table_row
    column = tl.arange(0, SIZE)
    for begin in range(tl.program_id(0) * TILE, count, tl.num_programs(0) * TILE):
        row_L = begin + tl.arange(0, TILE)
        live_L = row_L < count
        key_L = row_L // heads_here
        page_L = tl.load(pages + key_L // page_size, mask=live_L, other=0).to(tl.int64)
        slot_L = page_L * page_size + key_L % page_size
        at_L = slot_L * heads + first_head + row_L % heads_here
        even_k, odd_k = stored_values(k_codes, k_scales, at_L, live_L, SIZE, TILE)
        even_v, odd_v = stored_values(v_codes, v_scales, at_L, live_L, SIZE, TILE)
        to = ((start * heads_here + row_L) * SIZE)[:, None] + column[None, :]
        live = live_L[:, None]
        tl.store(keys + to, tl.interleave(as_bf16(even_k), as_bf16(odd_k)), mask=live)
        tl.store(values + to, tl.interleave(as_bf16(even_v), as_bf16(odd_v)), mask=live)
