"""Advantages and loss of the demo's policy step: exact values of small groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demo.grpo import clipped_loss, group_advantages


def test_advantages_are_centred_and_scaled_within_their_group() -> None:
    """Group 0 has mean 2 and deviation 1, group 7 mean 10 and deviation 3."""
    rewards = torch.tensor([1.0, 7.0, 3.0, 13.0])
    groups = torch.tensor([0, 7, 0, 7])
    expected = [-1 / 1.0001, -3 / 3.0001, 1 / 1.0001, 3 / 3.0001]
    assert group_advantages(rewards, groups).tolist() == pytest.approx(expected, rel=1e-6)


def test_a_group_of_equal_rewards_has_no_advantages() -> None:
    assert group_advantages(torch.full((3,), 5.0), torch.zeros(3)).tolist() == [0.0] * 3


@settings(deadline=None)
@given(
    rewards=st.lists(st.integers(-100, 100).map(float), min_size=2, max_size=8),
    split=st.integers(1, 7),
)
def test_advantages_of_every_group_sum_to_zero(rewards: list[float], split: int) -> None:
    groups = (torch.arange(len(rewards)) >= split).long()
    advantages = group_advantages(torch.tensor(rewards), groups)
    for group in groups.unique():
        assert abs(float(advantages[groups == group].sum())) < 1e-2 * len(rewards)


def test_a_shift_of_all_rewards_changes_nothing() -> None:
    rewards, groups = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 1, 1])
    shifted = group_advantages(rewards + 64.0, groups)
    torch.testing.assert_close(group_advantages(rewards, groups), shifted)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.4),  # no more than 1.2 of a good token
        (1.5, -2.0, 3.0),  # all of a bad one
        (0.5, 2.0, -1.0),
        (0.5, -2.0, 1.6),  # no less than 0.8
    ],
)
def test_the_loss_is_clipped_where_that_is_the_worse(
    ratio: float, advantage: float, loss: float
) -> None:
    old = torch.tensor([-1.5, -1.5])
    new = old + torch.tensor([ratio, 7.0]).log()
    sampled = torch.tensor([1.0, 0.0])  # the second token is the prompt's
    found = clipped_loss(new, old, torch.full((2,), advantage), sampled)
    assert float(found) == pytest.approx(loss, rel=1e-5)


def test_the_loss_is_a_sum_over_the_sampled_tokens_and_has_its_clip() -> None:
    zero = torch.zeros(3)
    found = clipped_loss(
        zero, zero, torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, True, False])
    )
    assert float(found) == -3.0
    new = torch.tensor([2.0]).log()
    one = torch.ones(1)
    assert float(clipped_loss(new, torch.zeros(1), one, one, clip=0.5)) == pytest.approx(-1.5)
