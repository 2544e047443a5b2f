"""The Triton loop over FP4 keys and values against dequantize-then-attend."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_trace.attention.extend import extend_attention
from sglang_trace.attention.paged_kv import PagedKV
from sglang_trace.attention.reference import attend, kv_slots
from tests.sglang_trace.attention.pools import random_kv, random_queries, worst_error
from tests.sglang_trace.kernels.inputs import DEVICE, needs_gpu

SM_SCALE = 0.13


def extended(q: Tensor, kv: PagedKV, new: list[int]) -> Tensor:
    """What the kernel computes, into memory that is not zero."""
    new_B = torch.tensor(new, dtype=torch.int32, device=DEVICE)
    return extend_attention(
        q,
        kv,
        starts_B=new_B.cumsum(0) - new_B,
        new_B=new_B,
        max_new=max(new),
        sm_scale=SM_SCALE,
        out_THD=torch.full_like(q, torch.nan),
    )


def error_of(
    chunks: list[tuple[int, int]], heads: int, group: int, size: int, page: int, seed: int
) -> float:
    """The worst error over requests of (prefix, new) tokens, in units of what is allowed."""
    new = [each for _prefix, each in chunks]
    kv = random_kv([prefix + each for prefix, each in chunks], heads, size, page, seed)
    q = random_queries(sum(new), heads * group, size, seed + 1)
    return worst_error(extended(q, kv, new), attend(q, kv, new, SM_SCALE))


chunk = st.tuples(st.integers(0, 90), st.integers(1, 24))


@settings(max_examples=25, deadline=None)
@given(
    chunks=st.lists(chunk, min_size=1, max_size=3),
    heads=st.integers(1, 2),
    group=st.integers(1, 16),
    page=st.sampled_from((1, 16, 64)),
    seed=st.integers(0, 10**6),
)
def test_ragged_chunks_see_their_prefix_and_themselves(
    chunks: list[tuple[int, int]], heads: int, group: int, page: int, seed: int
) -> None:
    assert error_of(chunks, heads, group, 64, page, seed) < 1


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    "chunk",
    [(0, 1), (0, 65), (63, 1), (64, 2), (200, 17)],
    ids=lambda chunk: f"{chunk[0]}+{chunk[1]}",
)
def test_tile_edges_of_every_head_size(size: int, chunk: tuple[int, int]) -> None:
    assert error_of([chunk], 2, 4, size, 16, seed=size) < 1


def test_one_query_token_a_request_is_decode() -> None:
    assert error_of([(0, 1), (130, 1), (64, 1), (7, 1)], 2, 8, 128, 1, seed=3) < 1


def test_keys_of_other_requests_and_beyond_the_end_are_not_read() -> None:
    """Every slot that is not the request's own would make its output NaN."""
    kv = random_kv([40], 2, 64, page_size=16, seed=4)
    q = random_queries(3, 4, 64, seed=5)
    expected = extended(q, kv, [3])
    others = torch.ones(len(kv.k_codes_PHd), dtype=torch.bool)
    others[kv_slots(kv, 0).cpu()] = False
    for scales in (kv.k_scales_PHb, kv.v_scales_PHb):
        scales[others.to(DEVICE)] = 0x7F
    assert torch.equal(extended(q, kv, [3]), expected)


def test_a_key_that_is_nan_is_not_hidden() -> None:
    kv = random_kv([70], 1, 64, seed=6)
    q = random_queries(2, 2, 64, seed=7)
    kv.k_scales_PHb[kv_slots(kv, 0)[11]] = 0x7F
    assert bool(extended(q, kv, [2]).isnan().all())


@pytest.mark.parametrize("power", [-60, -20, 20, 60])
def test_queries_of_any_magnitude_are_exact_operands(power: int) -> None:
    """FP16 alone would lose them; the scores themselves stay small."""
    kv = random_kv([50], 1, 64, seed=8, k_scale=2.0**-power)
    q = random_queries(5, 2, 64, seed=9) * 2.0**power
    assert worst_error(extended(q, kv, [5]), attend(q, kv, [5], SM_SCALE)) < 1


def test_an_unknown_head_size_is_refused() -> None:
    kv = random_kv([3], 1, 32)
    with pytest.raises(ValueError, match="heads of"):
        extended(random_queries(1, 1, 32, seed=0), kv, [1])


@pytest.mark.gpu
@needs_gpu
def test_five_hundred_random_batches_on_a_gpu() -> None:
    dice = random.Random(0)
    began, worst = time.monotonic(), 0.0
    for case in range(500):
        size, group = dice.choice(((64, 4), (128, 8), (128, 5), (128, 16), (256, 8)))
        chunks = [
            (dice.choice((0, dice.randrange(3000))), dice.randrange(1, dice.choice((2, 40, 700))))
            for _ in range(dice.randrange(1, 5))
        ]
        page = dice.choice((1, 16, 64))
        error = error_of(chunks, dice.choice((1, 2, 4)), group, size, page, seed=case)
        worst = max(worst, error)
        if case % 100 == 99:
            print(f"{case + 1} batches, worst {worst:.3f}, {time.monotonic() - began:.1f} s")
        assert error < 1, (case, chunks, size, group, page)
