"""BF16 keys and values are those of the pool's code words and block scales, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.fp4.nvfp4 import NVFP4_BLOCK, Fp4Tensor, unpack_nibbles
from sglang_trace.kernels.kv import dequantize
from sglang_trace.kernels.kv.dequantize import dequantize_keys_and_values
from tests.sglang_trace.kernels.inputs import DEVICE, needs_gpu, same_bits


def random_pool(slots: int, heads: int, size: int, seed: int) -> tuple[Tensor, ...]:
    """Codes and scales of keys, then of values: every code word, every scale, NaN included."""
    generator = torch.Generator().manual_seed(seed)

    def random(width: int, codes: int) -> Tensor:
        shape = slots, heads, size // width
        return torch.randint(0, codes, shape, generator=generator, dtype=torch.uint8).to(DEVICE)

    return random(2, 256), random(NVFP4_BLOCK, 128), random(2, 256), random(NVFP4_BLOCK, 128)


def reference(codes: Tensor, scales: Tensor) -> Tensor:
    one = torch.ones((), device=codes.device)
    return Fp4Tensor(unpack_nibbles(codes), scales, one, NVFP4_BLOCK).dequantize()


def check(
    lengths: list[int], heads: int, some: slice, size: int, page_size: int, seed: int
) -> None:
    """Requests whose pages lie anywhere; the rows of the table are not in their order."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in lengths]
    pool = random_pool((sum(pages) + 1) * page_size, heads, size, seed)
    order = (torch.randperm(sum(pages), generator=generator).int() + 1).split(pages)
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    table = torch.zeros(len(lengths) + 2, max(pages), dtype=torch.int32)
    slots = []
    for row, mine, length in zip(rows.tolist(), order, lengths, strict=True):
        table[row, : len(mine)] = mine
        slots.append((mine[:, None] * page_size + torch.arange(page_size)).flatten()[:length])
    slots_N = torch.cat(slots).long().to(DEVICE)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    # One row more, which must stay as it is.
    out = torch.full((2, len(slots_N) + 1, some.stop - some.start, size), 7.0).bfloat16()
    out = out.to(DEVICE)
    dequantize_keys_and_values(
        *pool,
        table_RE=table.to(DEVICE),
        rows_B=rows.to(DEVICE),
        starts_S=starts.to(DEVICE),
        max_keys=max(lengths),
        heads=some,
        page_size=page_size,
        k_NhD=out[0],
        v_NhD=out[1],
    )
    for found, codes, scales in ((out[0], *pool[:2]), (out[1], *pool[2:])):
        wanted = reference(codes, scales)[slots_N][:, some]
        assert same_bits(found[:-1].float(), wanted), "exact, not rounded"
        assert bool((found[-1] == 7.0).all())


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    heads=st.integers(1, 5),
    bounds=st.tuples(st.integers(0, 4), st.integers(1, 5)),
    page_size=st.sampled_from((1, 16, 64)),
    seed=st.integers(0, 10**6),
)
def test_some_heads_of_some_requests_in_the_order_of_positions(
    lengths: list[int], heads: int, bounds: tuple[int, int], page_size: int, seed: int
) -> None:
    first = min(bounds[0], heads - 1)
    check(lengths, heads, slice(first, max(first + 1, min(bounds[1], heads))), 64, page_size, seed)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_every_head_size(size: int) -> None:
    check([33, 1, 90], 2, slice(0, 2), size, 1, seed=size)


def test_a_program_goes_on_to_further_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "_MAX_PROGRAMS", 3)
    check([300, 5, 131], 3, slice(1, 3), 64, 16, seed=1)


def test_every_code_word_at_every_scale_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(128).view(128, 4, 64)
    scales = torch.arange(128, dtype=torch.uint8).view(128, 1, 1).expand(128, 4, 8).contiguous()
    codes, scales = codes.to(DEVICE), scales.to(DEVICE)
    out = torch.empty(2, 128, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    dequantize_keys_and_values(
        *(codes, scales, codes, scales),
        table_RE=torch.arange(128, dtype=torch.int32, device=DEVICE)[None],
        rows_B=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        starts_S=torch.tensor([0, 128], dtype=torch.int32, device=DEVICE),
        max_keys=128,
        heads=slice(0, 4),
        page_size=1,
        k_NhD=out[0],
        v_NhD=out[1],
    )
    wanted = reference(codes, scales)
    assert same_bits(out[0].float(), wanted)
    assert same_bits(out[1].float(), wanted)


@pytest.mark.gpu
@needs_gpu
def test_more_tiles_than_programs_on_a_gpu() -> None:
    check([70_000, 5, 131_072], 4, slice(1, 4), 128, 1, seed=0)
