"""Pools of random FP4 keys and values, requests of random lengths whose pages lie anywhere."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bridge.fp4.nvfp4 import pack_nibbles, quantize_nvfp4
from sglang_trace.attention.paged_kv import PagedKV
from sglang_trace.attention.reference import attend
from tests.sglang_trace.kernels.inputs import DEVICE

# Of BF16 numbers of these sizes: 2^-8 for the output's own rounding, the rest for the weights.
RELATIVE, ABSOLUTE = 2**-7, 2**-9


def random_kv(
    lengths: list[int],
    heads: int,
    size: int,
    page_size: int = 1,
    seed: int = 0,
    k_scale: float = 0.5,
    v_scale: float = 0.25,
) -> PagedKV:
    """A pool with one page more than the requests need, in which their pages are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    most = max(1, *(-(-length // page_size) for length in lengths))
    rows = len(lengths) + 2
    pages = 1 + len(lengths) * most
    table = torch.zeros(rows, most, dtype=torch.int32)
    order = torch.randperm(pages - 1, generator=generator).int() + 1
    row_of = torch.randperm(rows, generator=generator)[: len(lengths)]
    table[row_of] = order.view(len(lengths), most)

    values = torch.Generator(DEVICE).manual_seed(seed)

    def stored(scale: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(pages * page_size, heads, size, generator=values, device=DEVICE)
        found = quantize_nvfp4(x, torch.tensor(scale, device=DEVICE))
        return pack_nibbles(found.codes_u8), found.scales_u8

    return PagedKV(
        *stored(k_scale),
        *stored(v_scale),
        table.to(DEVICE),
        row_of.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_size,
        k_scale,
        v_scale,
    )


def random_queries(tokens: int, heads: int, size: int, seed: int) -> Tensor:
    """BF16 queries [T, HQ, D], every row of another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = 2.0 ** torch.randint(-3, 3, (tokens, heads, 1), generator=generator)
    return (torch.randn(tokens, heads, size, generator=generator) * spread).bfloat16().to(DEVICE)


def worst_error(out: Tensor, expected: Tensor) -> float:
    """The largest error in units of what is allowed; 1 is at the limit, NaN counts as infinite."""
    allowed = ABSOLUTE + RELATIVE * expected.abs()
    return float(((out.float() - expected).abs() / allowed).nan_to_num(torch.inf).max())


def flash_error(out: Tensor, q: Tensor, kv: PagedKV, new: list[int], sm_scale: float) -> float:
    """As `worst_error`, for kernels that round their weights to BF16.

    A weight is then off by up to 2^-9 of itself, so a sum of values of both signs is off by that
    share of the sum of magnitudes, twice which is allowed; the output itself is rounded once or
    twice, by 2^-9 of itself each time.
    """
    expected = attend(q, kv, new, sm_scale)
    magnitudes = attend(q, replace(kv, v_codes_PHd=kv.v_codes_PHd & 0x77), new, sm_scale)
    # Of values that are all zero nothing is allowed, and nothing is wrong.
    allowed = 2**-8 * (magnitudes + expected.abs()) + 2**-30
    return float(((out.float() - expected).abs() / allowed).nan_to_num(torch.inf).max())
