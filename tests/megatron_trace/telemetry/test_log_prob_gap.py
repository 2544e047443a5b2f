"""The gap is that of its definition, over micro-batches and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.telemetry.log_prob_gap import LogProbGap

LOG_PROBS = st.lists(st.floats(-20, 0), min_size=1, max_size=40)


@given(LOG_PROBS, st.integers(1, 5))
def test_figures_are_those_of_all_tokens_together(values: list[float], parts: int) -> None:
    trainer = torch.tensor(values, dtype=torch.float64)
    rollout = trainer.flip(0)
    gap = LogProbGap()
    for ours, theirs in zip(trainer.chunk(parts), rollout.chunk(parts), strict=True):
        gap.add(ours, theirs, torch.ones(len(ours), dtype=torch.bool))
    found = gap.summary()
    difference = trainer - rollout
    assert found.tokens == len(values)
    assert found.mean == pytest.approx(difference.abs().mean().item())
    assert found.p99 == pytest.approx(difference.abs().quantile(0.99).item())
    assert found.max == difference.abs().max().item()
    assert found.k3_kl >= 0
    assert found.k3_kl == pytest.approx((difference.exp() - 1 - difference).mean().item())


def test_only_sampled_tokens_count() -> None:
    gap = LogProbGap()
    gap.add(torch.tensor([-1.0, -9.0]), torch.tensor([-1.5, -1.0]), torch.tensor([True, False]))
    found = gap.summary()
    assert (found.tokens, found.max) == (1, 0.5)
    assert found.k3_kl == pytest.approx(math.exp(0.5) - 1.5)


def test_a_step_without_sampled_tokens_has_no_gap() -> None:
    assert LogProbGap().summary().to_dict() == {
        "mean": 0.0,
        "p99": 0.0,
        "max": 0.0,
        "k3_kl": 0.0,
        "tokens": 0,
    }


def test_ranks_with_different_numbers_of_tokens_count_together(one_rank: None) -> None:
    gap = LogProbGap()
    gap.add(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.ones(2).bool())
    assert gap.summary(torch.distributed.group.WORLD) == gap.summary()
