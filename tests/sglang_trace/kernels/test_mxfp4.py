"""The MXFP4 quantizer against `bridge.fp4.nvfp4`, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from bridge.fp4.nvfp4 import pack_nibbles, quantize_mxfp4
from sglang_trace.kernels.mxfp4 import quantize_mxfp4_packed
from tests.sglang_trace.kernels.inputs import (
    DEVICE,
    any_bf16,
    blocks_of,
    needs_gpu,
    usual_bf16,
    with_corners,
)


def differing(x_RN: Tensor) -> int:
    """Bytes in which kernel and reference differ."""
    packed, scales = quantize_mxfp4_packed(x_RN.to(DEVICE))
    expected = quantize_mxfp4(x_RN)
    return int((packed.cpu() != pack_nibbles(expected.codes_u8)).sum()) + int(
        (scales.cpu() != expected.scales_u8).sum()
    )


@settings(max_examples=60, deadline=None)
@given(x=blocks_of(32))
def test_any_numbers(x: Tensor) -> None:
    assert differing(x) == 0


@pytest.mark.parametrize("width", [32, 96, 160])
def test_every_kind_of_row(width: int) -> None:
    assert differing(any_bf16(12, width, 1)) == 0
    assert differing(with_corners(usual_bf16(12, width, 2), 3)) == 0


def test_the_least_and_the_largest_scale() -> None:
    powers = torch.tensor([2.0**-149, 2.0**-126, 2.0**-124, 6 * 2.0**-127, 2.0**127, 3.4e38])
    assert differing(powers.view(6, 1).repeat(1, 32)) == 0


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="BF16 or FP32"):
        quantize_mxfp4_packed(torch.zeros(1, 32, dtype=torch.float16))


@pytest.mark.gpu
@needs_gpu
def test_ten_million_values_on_a_gpu() -> None:
    x = torch.cat((any_bf16(3000, 2048, 4), with_corners(usual_bf16(3000, 2048, 5), 6)))
    assert differing(x) == 0
