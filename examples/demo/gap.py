"""The distance between rollout and trainer: |difference of log-probabilities| of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.demo.policy import Pack


class Gap:
    """Collects |log-prob gap| over packs."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, pack: Pack, logprobs_T: Tensor) -> None:
        """Takes the gaps of a pack's sampled tokens."""
        gap_T = (logprobs_T.detach() - pack.rollout_logprobs).abs()
        self._parts.append(gap_T[pack.sampled])

    def summary(self) -> dict[str, float]:
        """Mean, 99th percentile and maximum in nats, and how many tokens they are of."""
        gap = torch.cat(self._parts).double()
        return {
            "mean": gap.mean().item(),
            "p99": gap.quantile(0.99).item(),
            "max": gap.max().item(),
            "tokens": gap.numel(),
        }
