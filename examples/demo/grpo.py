"""Group-relative policy optimisation, as small as it can be (Shao et al. 2024, arXiv 2402.03300).

Shape legend: N trajectories, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """(reward - mean of its group) / (std of its group + 1e-4); float32 [N]."""
    advantages_N = torch.zeros_like(rewards_N)
    for group in groups_N.unique():
        mine_N = groups_N == group
        rewards = rewards_N[mine_N]
        advantages_N[mine_N] = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    return advantages_N


def clipped_loss(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    sampled_T: Tensor,
    clip: float = 0.2,
) -> Tensor:
    """Sum of the clipped policy-gradient loss over the sampled tokens of this pack."""
    ratio_T = (logprobs_T - rollout_logprobs_T).exp()
    clipped_T = ratio_T.clamp(1 - clip, 1 + clip)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    return (loss_T * sampled_T).sum()
