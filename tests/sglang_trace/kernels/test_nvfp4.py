"""The NVFP4 quantizer against `bridge.fp4.nvfp4`, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.fp4.nvfp4 import pack_nibbles, quantize_nvfp4, quantize_weight, token_scale
from sglang_trace.kernels.nvfp4 import quantize_nvfp4_packed, quantize_weights
from tests.sglang_trace.kernels.inputs import (
    DEVICE,
    any_bf16,
    blocks_of,
    needs_gpu,
    usual_bf16,
    with_corners,
)


def differing(x_MRN: Tensor, global_scale_M: Tensor) -> int:
    """Bytes in which kernel and reference differ."""
    x_MRN, global_scale_M = x_MRN.to(DEVICE), global_scale_M.to(DEVICE)
    *rows, width = x_MRN.shape
    packed = torch.full((*rows, width // 2), 0xAA, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((*rows, width // 16), 0xAA, dtype=torch.uint8, device=DEVICE)
    quantize_nvfp4_packed(x_MRN, global_scale_M, packed, scales)
    expected = quantize_nvfp4(x_MRN.cpu(), global_scale_M.cpu().view(-1, 1, 1))
    return int((packed.cpu() != pack_nibbles(expected.codes_u8)).sum()) + int(
        (scales.cpu() != expected.scales_u8).sum()
    )


@settings(max_examples=60, deadline=None)
@given(x=blocks_of(16), scale=st.floats(2.0**-126, 2.0**100, width=32))
def test_any_numbers_at_any_global_scale(x: Tensor, scale: float) -> None:
    assert differing(x[None], torch.tensor([scale])) == 0


@settings(max_examples=40, deadline=None)
@given(x=blocks_of(16))
def test_any_numbers_at_the_scale_made_for_them(x: Tensor) -> None:
    for row in x:
        assert differing(row[None, None], token_scale(row)) == 0


@pytest.mark.parametrize("width", [16, 48, 64, 208])
def test_every_kind_of_row(width: int) -> None:
    x = torch.stack([any_bf16(12, width, 1), with_corners(usual_bf16(12, width, 2), 3)])
    assert differing(x, torch.tensor([2.0**-3, 0.3])) == 0


def test_a_global_scale_that_is_nan_or_too_small_marks_every_block() -> None:
    x = usual_bf16(6, 32, 4).expand(3, 6, 32).contiguous()
    assert differing(x, torch.tensor([torch.nan, 0.0, 2.0**-149])) == 0


def test_slices_of_larger_tensors_are_written_in_place() -> None:
    x = usual_bf16(16, 32, 5).view(2, 8, 32).to(DEVICE)
    packed = torch.full((2, 8, 16), 0xAA, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((2, 8, 2), 0xAA, dtype=torch.uint8, device=DEVICE)
    quantize_nvfp4_packed(x[:, 4:], torch.ones(2, device=DEVICE), packed[:, 4:], scales[:, 4:])
    expected = quantize_nvfp4(x[:, 4:].cpu(), torch.ones(2, 1, 1))
    assert torch.equal(packed[:, 4:].cpu(), pack_nibbles(expected.codes_u8))
    assert torch.equal(scales[:, 4:].cpu(), expected.scales_u8)
    assert bool((packed[:, :4] == 0xAA).all())
    assert bool((scales[:, :4] == 0xAA).all())


def test_weights_are_quantized_as_the_trainer_does_and_stay_where_they_are() -> None:
    w = torch.stack([usual_bf16(8, 64, seed) for seed in range(5)]).to(DEVICE)
    w[1] = 0.0
    w[2, 3, 5] = torch.inf
    w[3] *= 2.0**-60
    packed = torch.zeros(5, 8, 32, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(5, 8, 4, dtype=torch.uint8, device=DEVICE)
    global_scale = torch.zeros(5, device=DEVICE)
    places = [t.data_ptr() for t in (packed, scales, global_scale)]
    quantize_weights(w, packed, scales, global_scale)
    assert places == [t.data_ptr() for t in (packed, scales, global_scale)]
    for expert in range(5):
        expected = quantize_weight(w[expert].cpu())
        assert torch.equal(packed[expert].cpu(), pack_nibbles(expected.codes_u8))
        assert torch.equal(scales[expert].cpu(), expected.scales_u8)
        assert torch.equal(
            global_scale[expert].cpu().view(torch.int32), expected.global_scale.view(torch.int32)
        )


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.zeros(1, 1, 24, dtype=torch.bfloat16), "do not divide"),
        (torch.zeros(1, 1, 16, dtype=torch.float16), "BF16 or FP32"),
    ],
)
def test_what_the_kernel_does_not_compute_is_refused(x: Tensor, reason: str) -> None:
    out = torch.zeros(1, 1, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=reason):
        quantize_nvfp4_packed(x, torch.ones(1), out, out)


@pytest.mark.gpu
@needs_gpu
def test_ten_million_values_on_a_gpu() -> None:
    x = torch.cat((any_bf16(3000, 2048, 6), with_corners(usual_bf16(3000, 2048, 7), 8)))
    assert differing(x.view(2, 3000, 2048), torch.tensor([1.0, 2.0**-5])) == 0
