"""fc2's kernel against torch's silu, the reference quantizer and the record layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.fp4.triton_arithmetic import upcast
from bridge.layout import Site
from sglang_trace.kernels.fc2_quantize import quantize_expert_slots, silu_bf16
from sglang_trace.quantization.reference import quantize_activation
from tests.sglang_trace.kernels.inputs import (
    DEVICE,
    any_bf16,
    needs_gpu,
    operand_order,
    same_bits,
    usual_bf16,
    with_corners,
)
from tests.sglang_trace.kernels.staged import empty_rows, layout_of, place_of


def check(gate_up_R2I: Tensor, slots: int, bits: int = 1, scale_bits: int = 8) -> None:
    """Run the kernel and compare operand and staging rows."""
    rows, both = gate_up_R2I.shape
    width, tokens = both // 2, rows // slots
    layout = layout_of(16, width, slots, bits, scale_bits=scale_bits)
    place = place_of(layout, tokens + 1, 2)
    operand = torch.full((rows, width), 7, dtype=torch.bfloat16, device=DEVICE)
    quantize_expert_slots(gate_up_R2I.to(DEVICE), slots, operand, place)

    h_TKI = (F.silu(gate_up_R2I[:, :width]) * gate_up_R2I[:, width:]).view(tokens, slots, width)
    expected = quantize_activation(h_TKI)
    wanted = empty_rows(layout, tokens + 1)
    layout.write_site(
        wanted[:tokens], Site.FC2, 2, expected.codes_u8, expected.scales_u8, expected.global_scale
    )
    assert torch.equal(place.rows_MB.cpu(), wanted)
    assert same_bits(operand, operand_order(expected.dequantize(torch.bfloat16)).view(rows, width))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [32, 64, 96])
def test_the_row_is_the_layouts_and_the_operand_is_exact(width: int, bits: int) -> None:
    check(with_corners(usual_bf16(6, 2 * width, bits), bits), 3, bits)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    slots=st.integers(1, 4),
    scale_bits=st.sampled_from((8, 2)),
    blocks=st.integers(1, 5),
)
def test_any_bit_patterns(seed: int, slots: int, scale_bits: int, blocks: int) -> None:
    check(any_bf16(2 * slots, 64 * blocks, seed), slots, scale_bits=scale_bits)


def test_silu_is_torchs_for_every_bf16_number(monkeypatch: pytest.MonkeyPatch) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = torch.empty_like(every, device=DEVICE)
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton.jit(silu_of_every)[(64,)](every.to(DEVICE), found)
    assert same_bits(found, F.silu(every))


def silu_of_every(x, y):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + at, silu_bf16(upcast(tl.load(x + at))))


@pytest.mark.gpu
@needs_gpu
def test_ten_million_sites_on_a_gpu() -> None:
    check(any_bf16(4 * 8 * 400, 2 * 768, 1), 8, 4)
    check(with_corners(usual_bf16(4 * 8 * 400, 2 * 768, 2), 3), 8, 1)
    check(any_bf16(4 * 8 * 400, 2 * 768, 3), 8, 1, scale_bits=2)
