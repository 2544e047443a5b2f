"""Prefill over dequantized keys and values against dequantize-then-attend.

Where there is no GPU another attention of torch takes the place of its flash attention
(`stand_in.py`): tested is then what it is given, and where its results go.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_trace.attention import extend_pieces
from sglang_trace.attention.extend_flash import extend_flash, flash_attention
from sglang_trace.attention.extend_pieces import LONG, pieces_of
from sglang_trace.attention.paged_kv import PagedKV
from sglang_trace.attention.reference import kv_slots
from tests.sglang_trace.attention.pools import flash_error, random_kv, random_queries
from tests.sglang_trace.kernels.inputs import DEVICE, needs_gpu

SM_SCALE = 0.13


def extended(q: Tensor, kv: PagedKV, new: list[int], sm_scale: float = SM_SCALE) -> Tensor:
    """What prefill computes, into memory that is not zero."""
    pieces = pieces_of(
        new,
        kv.lengths_B.tolist(),
        heads=kv.heads,
        size=q.shape[2],
        device=DEVICE,
    )
    return extend_flash(
        q,
        kv,
        pieces,
        sm_scale=sm_scale,
        out_THD=torch.full_like(q, torch.nan),
    )


@contextmanager
def scratch_of(keys: int, size: int) -> Iterator[None]:
    """A scratch for so many keys and values of one head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extend_pieces, "SCRATCH_BYTES", keys * size * 4)
        yield


def error_of(
    chunks: list[tuple[int, int]], heads: int, group: int, size: int, page: int, seed: int
) -> float:
    """The worst error over requests of (prefix, new) tokens, in units of what is allowed."""
    new = [each for _prefix, each in chunks]
    kv = random_kv([prefix + each for prefix, each in chunks], heads, size, page, seed)
    q = random_queries(sum(new), heads * group, size, seed + 1)
    return flash_error(extended(q, kv, new), q, kv, new, SM_SCALE)


chunk = st.tuples(st.integers(0, 90), st.integers(1, 24))


@settings(max_examples=25, deadline=None)
@given(
    chunks=st.lists(chunk, min_size=1, max_size=4),
    heads=st.integers(1, 3),
    group=st.integers(1, 16),
    page=st.sampled_from((1, 16, 64)),
    room=st.integers(1, 400),
    seed=st.integers(0, 10**6),
)
def test_ragged_chunks_see_their_prefix_and_themselves_in_any_pieces(
    chunks: list[tuple[int, int]], heads: int, group: int, page: int, room: int, seed: int
) -> None:
    with scratch_of(room, 64):
        assert error_of(chunks, heads, group, 64, page, seed) < 1


@pytest.mark.parametrize("size", [64, 128, 256])
def test_every_head_size_with_and_without_a_prefix(size: int) -> None:
    assert error_of([(0, 65), (70, 9), (0, 1), (40, 1)], 2, 4, size, 16, seed=size) < 1


def test_global_scales_that_are_no_power_of_two_are_applied() -> None:
    kv = random_kv([50, 20], 2, 64, seed=2, k_scale=0.37, v_scale=1.9)
    q = random_queries(12, 8, 64, seed=3)
    assert flash_error(extended(q, kv, [5, 7]), q, kv, [5, 7], SM_SCALE) < 1


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


def test_queries_among_other_columns_and_tokens_are_read_where_they_lie() -> None:
    """SGLang's queries are a part of what one projection wrote."""
    kv = random_kv([30, 12], 2, 64, seed=6)
    q = random_queries(9, 4, 64, seed=7)
    wide = torch.full((9, 7, 64), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 2:6] = q
    assert torch.equal(extended(wide[:, 2:6], kv, [4, 5]), extended(q, kv, [4, 5]))


@pytest.mark.parametrize("requests", [1, 3])
def test_the_operator_takes_what_it_is_given(requests: int) -> None:
    """On tensors without memory, so on every host: names, types and shapes alone."""
    (piece,) = pieces_of([5] * requests, [20] * requests, heads=2, size=64, device="meta")
    q, kv = (
        torch.empty(tokens * requests, heads, 64, dtype=torch.bfloat16, device="meta")
        for tokens, heads in ((5, 8), (20, 2))
    )
    found = flash_attention(q, kv, kv, piece, SM_SCALE)
    assert found.shape == q.shape
    assert found.dtype == torch.bfloat16


# --- on a GPU, with the real thing

HEADS = ((4, 8, 128), (4, 16, 128), (8, 4, 128), (4, 4, 64), (2, 8, 256), (1, 5, 64))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_heads_of_every_shape_on_a_gpu(shape: tuple[int, int, int]) -> None:
    heads, group, size = shape
    for number, chunks in enumerate(
        (
            [(0, 2048)],
            [(3000, 500)],
            [(LONG, 1)],
            [(0, 700), (1, 1), (900, 130), (4000, 1), (63, 65)],
            [(0, 300), (LONG + 100, 40), (20, 20)],
        )
    ):
        error = error_of(chunks, heads, group, size, 1, seed=number)
        print(f"{shape} {chunks}: {error:.3f} of what is allowed")
        assert error < 1, chunks


@pytest.mark.gpu
@needs_gpu
def test_a_short_chunk_after_131072_keys_on_a_gpu() -> None:
    error = error_of([(131_072, 128)], 4, 8, 128, 1, seed=1)
    print(f"{error:.3f} of what is allowed")
    assert error < 1


@pytest.mark.gpu
@needs_gpu
def test_two_hundred_random_batches_in_random_pieces_on_a_gpu() -> None:
    dice = random.Random(0)
    began, worst = time.monotonic(), 0.0
    for case in range(200):
        heads, group, size = dice.choice(HEADS)
        chunks = [
            (dice.choice((0, dice.randrange(3000))), dice.randrange(1, dice.choice((2, 40, 700))))
            for _ in range(dice.randrange(1, 7))
        ]
        page, room = dice.choice((1, 16, 64)), dice.choice((500, 5000, 10**6))
        with scratch_of(room, size):
            error = error_of(chunks, heads, group, size, page, seed=case)
        worst = max(worst, error)
        if case % 50 == 49:
            print(f"{case + 1} batches, worst {worst:.3f}, {time.monotonic() - began:.1f} s")
        assert error < 1, (case, chunks, heads, group, size, page, room)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", [[70], [131_200], [70, 300]], ids=str)
def test_a_key_that_is_nan_is_not_hidden_on_a_gpu(lengths: list[int]) -> None:
    kv = random_kv(lengths, 1, 64, seed=6)
    new = [2] * len(lengths)
    q = random_queries(sum(new), 2, 64, seed=7)
    kv.k_scales_PHb[kv_slots(kv, 0)[11]] = 0x7F
    out = extended(q, kv, new)
    assert bool(out[:2].isnan().all())
    assert bool(out[2:].isfinite().all()), "only the request's own output"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("power", [-60, -20, 20, 60])
def test_queries_of_any_magnitude_on_a_gpu(power: int) -> None:
    """The keys' global scale makes up for it."""
    kv = replace(random_kv([50], 1, 64, seed=8), k_scale=2.0**-power)
    q = random_queries(5, 2, 64, seed=9) * 2.0**power
    assert flash_error(extended(q, kv, [5]), q, kv, [5], SM_SCALE) < 1


@pytest.mark.gpu
@needs_gpu
def test_prefill_neither_waits_nor_takes_more_than_its_scratch_on_a_gpu() -> None:
    new, lengths = [8] * 16, [4096] * 15 + [LONG]
    kv = random_kv(lengths, 4, 128, seed=10)
    q = random_queries(sum(new), 32, 128, seed=11)
    mebibytes = 16
    with scratch_of((mebibytes << 20) // (4 * 128), 128):
        extended(q, kv, new)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = torch.empty_like(q)
        torch.cuda.set_sync_debug_mode("error")
        try:
            pieces = pieces_of(new, lengths, heads=4, size=128, device=DEVICE)
            extend_flash(
                q,
                kv,
                pieces,
                sm_scale=SM_SCALE,
                out_THD=out,
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    more = (torch.cuda.max_memory_allocated() - before) / 2**20
    whole = sum(lengths) * 4 * 128 * 4 / 2**20
    print(f"{more:.1f} MiB, of {whole:.0f} MiB dequantized at once")
    # Results and what flash attention keeps of split keys take the rest.
    assert more < mebibytes + 8 < whole / 4
    assert flash_error(out, q, kv, new, SM_SCALE) < 1
