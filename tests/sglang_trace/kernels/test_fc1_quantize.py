"""fc1's kernel against the reference quantizer and the record layout, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.layout import Site
from sglang_trace.kernels.fc1_quantize import quantize_tokens
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
from tests.sglang_trace.kernels.staged import (
    FORWARD_SITES,
    UNWRITTEN,
    empty_rows,
    layout_of,
    place_of,
)

SLOTS = 3


def check(
    x_TH: Tensor,
    bits: int = 1,
    sites: tuple[Site, ...] = FORWARD_SITES,
    layer: int = 2,
    scale_bits: int = 8,
) -> None:
    """Run the kernel and compare operand and all staging rows, two more than there are tokens."""
    tokens, hidden = x_TH.shape
    layout = layout_of(hidden, 16, SLOTS, bits, sites, scale_bits)
    place = place_of(layout, tokens + 2, layer)
    ids = torch.randint(0, 300, (tokens, SLOTS), generator=torch.Generator().manual_seed(0))
    operand = torch.full_like(x_TH, 7, dtype=torch.bfloat16).to(DEVICE)
    quantize_tokens(x_TH.to(DEVICE), ids.to(DEVICE), operand, place)

    expected = quantize_activation(x_TH)
    rows = empty_rows(layout, tokens + 2)
    if Site.ROUTES in sites:
        layout.write_routes(rows[:tokens], layer, ids)
    if Site.FC1 in sites and layer in layout.layers:
        layout.write_site(
            rows[:tokens],
            Site.FC1,
            layer,
            expected.codes_u8,
            expected.scales_u8,
            expected.global_scale,
        )
    assert torch.equal(place.rows_MB.cpu(), rows)
    assert same_bits(operand, operand_order(expected.dequantize(torch.bfloat16)))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("hidden", [32, 96, 160])
def test_the_row_is_the_layouts_and_the_operand_is_exact(hidden: int, bits: int) -> None:
    check(any_bf16(6, hidden, bits), bits)
    check(with_corners(usual_bf16(6, hidden, bits), 1), bits)


@pytest.mark.parametrize("hidden", [32, 64, 96, 160])
def test_scales_of_two_bits_are_packed_as_the_layout_packs_them(hidden: int) -> None:
    check(with_corners(usual_bf16(6, hidden, 1), 1), scale_bits=2)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    bits=st.integers(1, 4),
    scale_bits=st.sampled_from((8, 2)),
    blocks=st.integers(1, 5),
)
def test_any_bit_patterns(seed: int, bits: int, scale_bits: int, blocks: int) -> None:
    check(any_bf16(2, 32 * blocks, seed), bits, scale_bits=scale_bits)


@pytest.mark.parametrize("sites", [(Site.FC1,), (Site.ROUTES,), (Site.FC2,)])
def test_only_the_sites_of_the_layout_are_written(sites: tuple[Site, ...]) -> None:
    check(usual_bf16(5, 64, 2), sites=sites)


def test_a_layer_that_is_not_captured_records_its_routes_alone() -> None:
    check(usual_bf16(5, 64, 3), layer=0)


def test_nothing_is_recorded_without_a_place() -> None:
    x = usual_bf16(5, 64, 4).to(DEVICE)
    ids = torch.zeros(5, SLOTS, dtype=torch.int32, device=DEVICE)
    operand = torch.empty_like(x)
    quantize_tokens(x, ids, operand, None)
    assert same_bits(
        operand, operand_order(quantize_activation(x.cpu()).dequantize(torch.bfloat16))
    )


def test_rows_of_the_smallest_numbers_have_the_least_token_scale() -> None:
    """At 2^-116 no product of code word and scales is subnormal: no kernel can flush one."""
    sizes = [2.0**-133, 2.0**-126, 2.0**-117, 2688 * 2.0**-116, 2704 * 2.0**-116]
    x = torch.tensor(sizes)[:, None].repeat(1, 32).bfloat16()
    check(x)
    layout = layout_of(32, 16, SLOTS, 1, (Site.FC1,))
    place = place_of(layout, 5, 1)
    ids = torch.zeros(5, SLOTS, dtype=torch.int32, device=DEVICE)
    quantize_tokens(x.to(DEVICE), ids, torch.empty_like(x).to(DEVICE), place)
    token_scale = layout.site(place.rows_MB.cpu(), Site.FC1, 1).token_scale
    assert token_scale is not None
    assert token_scale[:, 0].tolist() == [2.0**-116] * 4 + [2.0**-115]


def test_a_width_that_the_gemm_cannot_take_apart_is_refused() -> None:
    x = usual_bf16(2, 48, 6)
    ids = torch.zeros(2, SLOTS, dtype=torch.int32)
    with pytest.raises(ValueError, match="32 do not divide"):
        quantize_tokens(x, ids, torch.empty_like(x), None)


def test_padding_rows_change_no_other_row() -> None:
    x = usual_bf16(6, 64, 5).to(DEVICE)
    ids = torch.zeros(6, SLOTS, dtype=torch.int32, device=DEVICE)
    layout = layout_of(64, 16, SLOTS, 2)
    seen = []
    for padding in (1.0, torch.nan):
        place = place_of(layout, 8, 1)
        x[4:] = padding
        quantize_tokens(x, ids, torch.empty_like(x), place)
        seen.append(place.rows_MB.cpu())
    assert torch.equal(seen[0][:4], seen[1][:4])
    assert not torch.equal(seen[0][4:6], seen[1][4:6])
    assert bool((seen[0][6:] == UNWRITTEN).all())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("bits", "scale_bits"), [(1, 8), (4, 8), (1, 2)])
def test_ten_million_sites_on_a_gpu(bits: int, scale_bits: int) -> None:
    check(any_bf16(2600, 2048, bits), bits, scale_bits=scale_bits)
    check(with_corners(usual_bf16(2600, 2048, bits), 6), bits, scale_bits=scale_bits)
