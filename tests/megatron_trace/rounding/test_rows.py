"""One call's rows beside their records: which rows and blocks follow, and what is counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bridge.fp4.bit_planes import pack_planes
from bridge.fp4.guided_rounding import MatchRule
from bridge.fp4.nvfp4 import E4M3_NAN, Fp4Tensor, quantize_nvfp4, token_scale
from bridge.layout import SiteRecord
from megatron_trace.rounding.rows import Counter, GuidanceSpec, RowState, SiteRows

RECORDED, MISSING, PADDING = RowState.RECORDED, RowState.MISSING, RowState.PADDING


def site_rows(recorded: Fp4Tensor, states: list[RowState], bits: int = 4) -> SiteRows:
    record = SiteRecord(
        pack_planes(recorded.codes_u8, bits), recorded.scales_u8, recorded.global_scale, bits, 8
    )
    return SiteRows(
        record=record,
        global_scale=recorded.global_scale,
        state=torch.tensor(states, dtype=torch.uint8),
        following=GuidanceSpec(bits, 8, MatchRule.PARITY, compare=bits == 4),
        counts=torch.zeros((1, len(Counter)), dtype=torch.int64),
        held=range(recorded.codes_u8.shape[-1]),
    )


def quantized(x: Tensor) -> Fp4Tensor:
    return quantize_nvfp4(x, token_scale(x))


def values(seed: int = 0, rows: int = 3) -> Tensor:
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_of_the_trainer_that_is_not_finite_stays_so(bad: float) -> None:
    """Guided, it would take a finite code word at the rollout's scale, and nobody would see it."""
    rollout = quantized(values())
    x, scale = values(), token_scale(values())
    x[1, 20] = bad
    own = quantize_nvfp4(x, scale)
    rows = site_rows(rollout, [RECORDED] * 3)
    used = rows.rounded(x, own, 0)
    assert used.scales_u8[1, 1] == E4M3_NAN
    assert used.dequantize()[1, 16:32].isnan().all()
    others = torch.ones(3, 3, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(used.scales_u8[others], rollout.scales_u8[others])
    blocks = used.codes_u8.unflatten(-1, (3, 16))
    assert torch.equal(blocks[others], rollout.codes_u8.unflatten(-1, (3, 16))[others])
    assert rows.counts is not None
    assert int(rows.counts[0, Counter.NON_FINITE]) == 16


def test_only_recorded_rows_follow_the_record() -> None:
    rollout, x = quantized(values(1)), values(2)
    own = quantized(x)
    rows = site_rows(rollout, [RECORDED, MISSING, PADDING])
    used = rows.rounded(x, own, 0)
    assert torch.equal(used.scales_u8[0], rollout.scales_u8[0])
    assert torch.equal(used.global_scale[0], rollout.global_scale[0])
    for row in (1, 2):
        assert torch.equal(used.codes_u8[row], own.codes_u8[row])
        assert torch.equal(used.scales_u8[row], own.scales_u8[row])
        assert torch.equal(used.global_scale[row], own.global_scale[row])
    assert rows.counts is not None
    assert int(rows.counts[0, Counter.GUIDED]) == int(rows.counts[0, Counter.MISSING]) == 48


def test_the_rollouts_own_values_give_its_own_code_words() -> None:
    x = values(3)
    rollout = quantized(x)
    rows = site_rows(rollout, [RECORDED] * 3, bits=1)
    used = rows.rounded(x, rollout, 0)
    assert torch.equal(used.codes_u8, rollout.codes_u8)
    assert torch.equal(used.dequantize(), rollout.dequantize())
