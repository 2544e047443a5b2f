"""Keys and values stored by the kernel against `bridge.fp4.nvfp4`, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.fp4.nvfp4 import pack_nibbles, quantize_nvfp4
from sglang_trace.kernels.kv.store import store_kv
from tests.sglang_trace.kernels.inputs import (
    DEVICE,
    any_bf16,
    blocks_of,
    needs_gpu,
    usual_bf16,
    with_corners,
)

UNTOUCHED = 0xAA


def differing(k_THD: Tensor, v_THD: Tensor, slots: Tensor, pool: int, scales: tuple) -> int:
    """Bytes of the whole pool that are not what the reference says."""
    heads = k_THD.shape[1]
    found, expected = [], []
    for x, scale in zip((k_THD, v_THD), scales, strict=True):
        quantized = quantize_nvfp4(x.cpu(), torch.tensor(scale))
        for values in (pack_nibbles(quantized.codes_u8), quantized.scales_u8):
            shape = (pool, heads, values.shape[-1])
            found.append(torch.full(shape, UNTOUCHED, dtype=torch.uint8, device=DEVICE))
            expected.append(torch.full(shape, UNTOUCHED, dtype=torch.uint8))
            expected[-1][slots.long()] = values
    k_scale, v_scale = (torch.tensor([scale], device=DEVICE) for scale in scales)
    store_kv(k_THD.to(DEVICE), v_THD.to(DEVICE), slots.to(DEVICE), k_scale, v_scale, *found)
    return sum(int((a.cpu() != b).sum()) for a, b in zip(found, expected, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    k=blocks_of(16),
    v=blocks_of(16),
    scale=st.floats(2.0**-126, 2.0**100, width=32),
    slots=st.permutations(range(5)),
)
def test_any_numbers_in_any_slots(k: Tensor, v: Tensor, scale: float, slots: list[int]) -> None:
    v = v.to(k.dtype)
    at = torch.tensor(slots[:2])
    assert differing(k.view(2, 2, 16), v.view(2, 2, 16), at, 5, (scale, 1.0)) == 0


@pytest.mark.parametrize(("heads", "size"), [(1, 64), (3, 64), (2, 128), (4, 256)])
def test_every_kind_of_row(heads: int, size: int) -> None:
    k = with_corners(usual_bf16(12, heads * size, 1), 2).view(12, heads, size)
    v = any_bf16(12, heads * size, 3).view(12, heads, size)
    slots = torch.randperm(30, generator=torch.Generator().manual_seed(4))[:12].int()
    assert differing(k, v, slots, 30, (0.013, 2.0)) == 0


def test_slices_of_a_fused_projection_are_read_in_place() -> None:
    heads, size = 2, 64
    qkv = usual_bf16(7, 3 * heads * size, 5)
    _, k, v = (x.view(7, heads, size) for x in qkv.split(heads * size, dim=1))
    assert not k.is_contiguous()
    assert differing(k, v, torch.arange(7), 8, (1.0, 1.0)) == 0


def test_no_token_writes_nothing() -> None:
    nothing = torch.zeros(0, 2, 64, dtype=torch.bfloat16)
    assert differing(nothing, nothing, torch.zeros(0, dtype=torch.int64), 3, (1.0, 1.0)) == 0


@pytest.mark.gpu
@needs_gpu
def test_ten_million_values_on_a_gpu() -> None:
    k = torch.cat((any_bf16(6000, 512, 6), with_corners(usual_bf16(6000, 512, 7), 8)))
    v = with_corners(usual_bf16(12000, 512, 9), 10)
    slots = torch.randperm(20000, generator=torch.Generator().manual_seed(11))[:12000]
    shape = (12000, 4, 128)
    assert differing(k.view(shape), v.view(shape), slots, 20000, (1.0, 2.0**-5)) == 0
