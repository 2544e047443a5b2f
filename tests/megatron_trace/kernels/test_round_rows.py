"""The rounding kernel gives the reference's bits and counts, whatever it is asked to follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.fp4.bit_planes import pack_planes
from bridge.fp4.guided_rounding import MatchRule
from bridge.fp4.nvfp4 import Fp4Tensor, quantize_nvfp4, token_scale
from bridge.fp4.scale_bits import pack_low_scales
from bridge.layout import SiteRecord
from megatron_trace.kernels.round_rows import RecordRows
from megatron_trace.kernels.round_rows import round_rows as kernel
from megatron_trace.rounding.rows import COUNTER_LANES, Counter, GuidanceSpec, SiteRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def activations(rng: np.random.Generator, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, with zeros, blocks of zeros, ties and some NaN and infinity."""
    x = rng.standard_normal((rows, width)) * 2.0 ** rng.integers(-30, 30, (rows, 1))
    x[rng.random((rows, width)) < 0.1] = 0
    x[:, :16] = np.where(rng.random((rows, 1)) < 0.3, 0, x[:, :16])
    x[-1] = np.resize([0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0, -0.25], width)
    if rows > 2 and rng.random() < 0.5:
        x[0, rng.integers(width)] = np.nan
        x[1, rng.integers(width)] = np.inf
    return torch.tensor(x, dtype=torch.float32, device=DEVICE).to(dtype)


def recorded(rng: np.random.Generator, x_RN: Tensor, noise: float) -> Fp4Tensor:
    """What a rollout with slightly other values recorded."""
    factor = 1 + noise * rng.standard_normal(tuple(x_RN.shape))
    other = torch.nan_to_num(x_RN.to(torch.float32), 1.0, 1.0, 1.0)
    other = other * torch.tensor(factor, dtype=torch.float32, device=DEVICE)
    return quantize_nvfp4(other, token_scale(other))


def equal(ours: Tensor, theirs: Tensor) -> None:
    """The same bits, where both are not NaN."""
    nan = torch.isnan(theirs)
    assert torch.equal(torch.isnan(ours), nan)
    kind = torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(ours[~nan].view(kind), theirs[~nan].view(kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [16, 48, 256])
def test_nearest_rounding_at_the_rows_own_scale(dtype: torch.dtype, width: int) -> None:
    x = activations(np.random.default_rng(width), 9, width, dtype)
    equal(kernel(x, None, None), quantize_nvfp4(x, token_scale(x)).dequantize(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nearest_rounding_at_given_scales(dtype: torch.dtype) -> None:
    x = activations(np.random.default_rng(1), 7, 64, dtype)
    one = torch.tensor(0.37, device=DEVICE)
    equal(kernel(x, one, None), quantize_nvfp4(x, one).dequantize(dtype))
    each = token_scale(x).nan_to_num(1.0) * 3
    equal(kernel(x, each, None), quantize_nvfp4(x, each).dequantize(dtype))


def test_rows_of_a_wider_tensor_are_read_where_they_lie() -> None:
    x = activations(np.random.default_rng(2), 5, 96, torch.bfloat16)[:, 32:80]
    equal(kernel(x, None, None), quantize_nvfp4(x, token_scale(x)).dequantize(torch.bfloat16))


@given(
    seed=st.integers(0, 2**32),
    record_bits=st.integers(1, 4),
    bits_left_out=st.integers(0, 4),
    record_scale_bits=st.sampled_from([2, 8]),
    scale_bits=st.sampled_from([2, 8]),
    reading=st.sampled_from(list(MatchRule)),
    per_row=st.booleans(),
    compare=st.booleans(),
    counting=st.booleans(),
    noise=st.sampled_from([0.0, 0.02, 0.3, 2.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
@settings(max_examples=120, deadline=None)
def test_guided_rounding_and_counts_are_those_of_the_reference(
    seed: int,
    record_bits: int,
    bits_left_out: int,
    record_scale_bits: int,
    scale_bits: int,
    reading: MatchRule,
    per_row: bool,
    compare: bool,
    counting: bool,
    noise: float,
    dtype: torch.dtype,
) -> None:
    rng = np.random.default_rng(seed)
    bits = max(record_bits - bits_left_out, 0)
    compare = compare and record_bits == 4
    scale_bits = min(scale_bits, record_scale_bits)
    rows, width, first, part = 6, 96, 32, 48
    whole = activations(rng, rows, width, dtype)
    rollout = recorded(rng, whole, noise)
    scale = rollout.global_scale if per_row else torch.tensor(1.5, device=DEVICE)
    record = SiteRecord(
        pack_planes(rollout.codes_u8, record_bits),
        rollout.scales_u8 if record_scale_bits == 8 else pack_low_scales(rollout.scales_u8),
        scale if per_row else None,
        record_bits,
        record_scale_bits,
    )
    state = torch.tensor(rng.integers(0, 3, rows), dtype=torch.uint8, device=DEVICE)
    x = whole[:, first : first + part]
    own = token_scale(x)
    lanes = (COUNTER_LANES, len(Counter))
    counts = torch.zeros(lanes, dtype=torch.int64, device=DEVICE) if counting else None
    following = GuidanceSpec(bits, scale_bits, reading, compare)
    reference = SiteRows(record, scale, state, following, counts, range(width))
    expected = reference.rounded(x, quantize_nvfp4(x, own), first).dequantize(dtype)
    found_counts = torch.zeros(lanes, dtype=torch.int64, device=DEVICE)
    found = kernel(
        x,
        own,
        RecordRows(
            record.planes_u8,
            record.scales_u8,
            scale,
            state,
            first,
            record_bits,
            record_scale_bits,
            bits,
            scale_bits,
            reading is MatchRule.NEAREST,
            compare,
            found_counts if counting else None,
        ),
    )
    equal(found, expected)
    if counts is not None:
        assert torch.equal(found_counts.sum(0), counts.sum(0))


def test_what_the_kernel_does_not_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 16"):
        kernel(torch.zeros(2, 24, device=DEVICE), None, None)
    with pytest.raises(ValueError, match=r"torch\.float16"):
        kernel(torch.zeros(2, 32, dtype=torch.float16, device=DEVICE), None, None)
