"""Decode over FP4 keys and values against dequantize-then-attend, whichever kernel does it."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.fp4.nvfp4 import pack_nibbles, quantize_nvfp4
from sglang_trace.attention.paged_kv import PagedKV
from sglang_trace.attention.reference import attend
from sglang_trace.attention.triton_decode import TritonDecode
from tests.sglang_trace.attention.pools import random_kv, random_queries, worst_error
from tests.sglang_trace.kernels.inputs import DEVICE, needs_gpu

SM_SCALE = 0.11
# Query heads, KV heads, head size: one compiled kernel each.
HEADS = ((32, 4, 128), (16, 4, 64), (64, 4, 128), (16, 2, 256), (4, 2, 64))
CASES = 420


def kernel(made: type, heads: tuple[int, int, int], max_batch: int) -> Any:
    q_heads, kv_heads, size = heads
    return made(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        max_batch=max_batch,
        device=DEVICE,
    )


def decoded(decode: Any, q: Tensor, kv: PagedKV) -> Tensor:
    """What a kernel computes, into memory that is not zero."""
    out = torch.full_like(q, torch.nan)
    result: Tensor = decode(q, kv, sm_scale=SM_SCALE, out_BHD=out)
    assert result.data_ptr() == out.data_ptr()
    return out


def error_of(decode: Any, q: Tensor, kv: PagedKV) -> float:
    expected = attend(q, kv, [1] * len(q), SM_SCALE)
    return worst_error(decoded(decode, q, kv), expected)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    page=st.sampled_from((1, 16, 64)),
    seed=st.integers(0, 10**6),
)
def test_triton_decodes_batches_smaller_than_the_most(
    lengths: list[int], page: int, seed: int
) -> None:
    kv = random_kv(lengths, 2, 64, page, seed)
    q = random_queries(len(lengths), 4, 64, seed)
    assert error_of(kernel(TritonDecode, (4, 2, 64), 4), q, kv) < 1


def big_pool(heads: int, size: int, pages: int, page_size: int) -> tuple[Tensor, ...]:
    """Codes and scales of keys and of values: blocks of other magnitudes, on the GPU."""
    pool: list[Tensor] = []
    for scale in (0.5, 0.25):
        shape = (pages * page_size, heads, size // 16, 16)
        x = torch.randn(shape, device=DEVICE) * 2.0 ** torch.randint(
            -4, 3, (*shape[:3], 1), device=DEVICE
        )
        found = quantize_nvfp4(x.flatten(2), torch.tensor(scale, device=DEVICE))
        pool += [pack_nibbles(found.codes_u8), found.scales_u8]
    return tuple(pool)


def random_length(dice: random.Random, most: int) -> int:
    """Short, long and at the edges of tiles and pages."""
    edge = 16 * dice.randrange(1, most // 16)
    return dice.choice((1, dice.randrange(1, 200), dice.randrange(1, most), edge, edge + 1))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
def test_two_thousand_random_batches_on_a_gpu(heads: tuple[int, int, int]) -> None:
    """Lengths, pages, batches at random; the parametrization adds up to 2,100 cases."""
    from sglang_trace.attention.decode import PagedDecode

    q_heads, kv_heads, size = heads
    dice, most, requests = random.Random(q_heads * size), 3000, 9
    torch.manual_seed(0)
    # The larger batches take two launches.
    decode = kernel(PagedDecode, heads, requests - 3)
    pools = {page: big_pool(kv_heads, size, -(-12000 // page), page) for page in (1, 16, 64)}
    began, worst = time.monotonic(), 0.0
    for case in range(CASES):
        page = dice.choice((1, 16, 64))
        lengths = [random_length(dice, most) for _ in range(dice.randrange(1, requests + 1))]
        pages = len(pools[page][0]) // page
        entries = -(-most // page)
        table = torch.randint(0, pages, (requests + 3, entries), dtype=torch.int32, device=DEVICE)
        rows = torch.randperm(requests + 3, device=DEVICE)[: len(lengths)]
        index = dice.choice((torch.int32, torch.int64))
        of = torch.tensor(lengths, dtype=index, device=DEVICE)
        kv = PagedKV(*pools[page], table, rows.to(index), of, page, 0.5, 0.25)
        q = torch.randn(len(lengths), q_heads, size, device=DEVICE).bfloat16()
        error = error_of(decode, q, kv)
        worst = max(worst, error)
        if case % 100 == 99:
            print(f"{case + 1} batches, worst {worst:.3f}, {time.monotonic() - began:.1f} s")
        assert error < 1, (case, lengths, page)
    print(f"{heads}: {CASES} batches, worst error {worst:.3f} of what is allowed")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", HEADS[:2], ids=lambda heads: "-".join(map(str, heads)))
def test_both_kernels_agree_on_long_requests(heads: tuple[int, int, int]) -> None:
    from sglang_trace.attention.decode import PagedDecode

    q_heads, kv_heads, size = heads
    torch.manual_seed(1)
    pool, lengths = big_pool(kv_heads, size, 70000, 1), [65537, 1, 40000]
    table = torch.randint(0, 70000, (3, 65537), dtype=torch.int32, device=DEVICE)
    rows, of = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([2, 0, 1], lengths))
    kv = PagedKV(*pool, table, rows, of, 1, 0.5, 0.25)
    q = torch.randn(3, q_heads, size, device=DEVICE).bfloat16()
    for made in (PagedDecode, TritonDecode):
        assert error_of(kernel(made, heads, 3), q, kv) < 1, made
