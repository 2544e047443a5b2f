"""Records that hold two bits of each block scale, in the real patched model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_rollout import SHAPE, Weights
from torch import Tensor

from bridge.layout import Site

pytestmark = pytest.mark.usefixtures("one_rank")

QUANTIZED = (Site.FC1, Site.FC2, Site.K, Site.V)
ROWS = 9 + 14 + 6 - 3  # every token but each sequence's last
BLOCKS_OF_A_TOKEN = {
    Site.FC1: SHAPE.hidden_size // 16,
    Site.FC2: SHAPE.top_k * SHAPE.moe_intermediate_size // 16,
    Site.K: SHAPE.num_kv_heads * SHAPE.head_dim // 16,
    Site.V: SHAPE.num_kv_heads * SHAPE.head_dim // 16,
}


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(9, 14, 6)


@pytest.fixture(scope="module")
def model(build_fp4: Callable[..., Any]) -> Any:
    return build_fp4()


@pytest.fixture(scope="module")
def roll_out(lib: Any, weights: Weights, sequences: list[Tensor]) -> Callable[..., Any]:
    """Records of a rollout whose values are off the trainer's by `noise`; equal but for width."""

    def make(scale_bits: int, noise: float) -> Any:
        layout = replace(lib.FULL_LAYOUT, scale_bits=scale_bits)
        return lib.roll_out(weights, sequences, noise, layout)[0]

    return make


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_two_bits_of_a_scale_guide_like_the_whole_scale(
    lib: Any, model: Any, sequences: list[Tensor], roll_out: Callable[..., Any], form: str
) -> None:
    run, line_up = getattr(lib, f"{form}_logits"), getattr(lib, form)
    whole = run(model, sequences, line_up(roll_out(8, 0.01), sequences))
    micro_batch = line_up(roll_out(2, 0.01), sequences, compare=True)
    low = run(model, sequences, micro_batch)
    assert torch.equal(low, whole)
    report = micro_batch.report()
    assert report.total().agreement_used >= 0.9999
    for site in QUANTIZED:
        count = report.total([site])
        assert count.read_scales == ROWS * SHAPE.num_layers * BLOCKS_OF_A_TOKEN[site]
        assert count.ambiguous_scales == 0
        assert count.ambiguous_share == 0.0
        assert (count.checked_scales, count.wrong_share) == (0, None)


@pytest.mark.parametrize("bits", [1, 4])
def test_two_bits_of_whole_scales_guide_like_two_bit_records(
    lib: Any, model: Any, sequences: list[Tensor], roll_out: Callable[..., Any], bits: int
) -> None:
    from_low = lib.packed(roll_out(2, 0.2), sequences, bits=bits)
    from_whole = lib.packed(roll_out(8, 0.2), sequences, bits=bits, scale_bits=2)
    low, whole = (lib.packed_logits(model, sequences, each) for each in (from_low, from_whole))
    assert torch.equal(low, whole)
    counts, checked = from_low.report().total(), from_whole.report().total()
    assert counts.read_scales == checked.read_scales == checked.checked_scales
    assert counts.ambiguous_scales == checked.ambiguous_scales > 0
    assert counts.checked_scales == 0


def test_scales_read_wrong_are_counted_where_the_record_holds_them_whole(
    lib: Any, model: Any, sequences: list[Tensor], roll_out: Callable[..., Any]
) -> None:
    shares = []
    for noise in (0.01, 0.1, 0.3):
        micro_batch = lib.packed(roll_out(8, noise), sequences, scale_bits=2)
        lib.packed_logits(model, sequences, micro_batch)
        total = micro_batch.report().total()
        assert total.silent_scales <= total.wrong_scales
        assert total.wrong_scales - total.silent_scales <= total.ambiguous_scales
        shares.append((total.ambiguous_share, total.wrong_share))
    assert shares[0] == (0.0, 0.0)
    assert shares[0] < shares[1] < shares[2]
    assert shares[1][1] < shares[2][1]
    assert 0 < total.silent_scales < total.wrong_scales, "some wrong ones were ambiguous, some not"


def test_whole_scales_are_read_as_they_are_and_not_counted(
    lib: Any, model: Any, sequences: list[Tensor], roll_out: Callable[..., Any]
) -> None:
    micro_batch = lib.packed(roll_out(8, 0.3), sequences)
    lib.packed_logits(model, sequences, micro_batch)
    total = micro_batch.report().total()
    assert (total.read_scales, total.ambiguous_share) == (0, None)


def test_scales_of_missing_rows_and_unguided_layers_are_not_counted(
    lib: Any, model: Any, sequences: list[Tensor], roll_out: Callable[..., Any]
) -> None:
    first, second, _ = roll_out(2, 0.01)
    gap = replace(second, forward_valid=second.forward_valid & (torch.arange(14) != 4))
    micro_batch = lib.packed(
        [first, gap, None], sequences, layers=(1, 2), on_missing="round_to_nearest", compare=True
    )
    lib.packed_logits(model, sequences, micro_batch)
    report = micro_batch.report()
    rows = 9 - 1 + 14 - 1
    assert report.total([Site.FC1]).read_scales == 2 * (rows - 1) * BLOCKS_OF_A_TOKEN[Site.FC1]
    assert report.total([Site.K]).read_scales == 2 * rows * BLOCKS_OF_A_TOKEN[Site.K]
    assert report.total(layers=[0, 3]).read_scales == 0


def test_reports_of_scales_add_up(
    lib: Any, model: Any, sequences: list[Tensor], roll_out: Callable[..., Any]
) -> None:
    micro_batch = lib.packed(roll_out(8, 0.2), sequences, scale_bits=2)
    lib.packed_logits(model, sequences, micro_batch)
    report = micro_batch.report()
    once, twice = report.total(), (report + report).total()
    for name in ("read", "ambiguous", "checked", "wrong", "silent"):
        assert getattr(twice, f"{name}_scales") == 2 * getattr(once, f"{name}_scales") > 0
