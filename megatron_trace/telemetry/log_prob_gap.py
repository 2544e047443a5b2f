"""The distance between rollout and trainer: log-probabilities of the same sampled tokens.

Shape legend: T tokens, in any shape.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class GapSummary:
    """Of |log p(trainer) - log p(rollout)| in nats: mean, 99th percentile, largest.

    k3_kl is the mean of exp(d) - d - 1 with d = log p(trainer) - log p(rollout), the estimator k3
    of KL(rollout || trainer) (J. Schulman, "Approximating KL Divergence"): never negative.
    """

    mean: float
    p99: float
    max: float
    k3_kl: float
    tokens: int

    def to_dict(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


class LogProbGap:
    """Collects a step's differences on their device; `summary` is the only wait for it."""

    def __init__(self) -> None:
        self._differences: list[Tensor] = []

    def add(self, trainer_T: Tensor, rollout_T: Tensor, sampled_T: Tensor) -> None:
        """Take the tokens of a micro-batch.

        Args:
            trainer_T: log-probabilities in the trainer (`token_logprobs`).
            rollout_T: those that the rollout returned.
            sampled_T: bool, which of the tokens the rollout sampled.
        """
        difference_T = trainer_T.detach().double() - rollout_T.to(trainer_T.device).double()
        self._differences.append(difference_T[sampled_T.to(trainer_T.device)])

    def summary(self, group: ProcessGroup | None = None) -> GapSummary:
        """Return the figures of all tokens so far; waits for the device.

        Args:
            group: the data-parallel ranks (context parallelism included) whose tokens count
                together, all of which must call.
        """
        mine = torch.cat(self._differences) if self._differences else torch.empty(0).double()
        difference = mine if group is None else _gathered(mine, group)
        if not len(difference):
            return GapSummary(0.0, 0.0, 0.0, 0.0, 0)
        gap = difference.abs()
        k3 = (difference.exp() - difference - 1).mean()
        mean, p99, largest, kl = torch.stack((gap.mean(), _p99(gap), gap.max(), k3)).tolist()
        return GapSummary(mean, p99, largest, kl, len(gap))


def _p99(gap: Tensor) -> Tensor:
    """As `torch.quantile`, which takes no more than 2^24 values."""
    place = 0.99 * (len(gap) - 1)
    below = int(place)
    ordered = gap.sort().values
    above = min(below + 1, len(gap) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


def _gathered(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the values of all ranks, which may hold different numbers of them."""
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    torch.distributed.all_gather(counts, count, group=group)
    sizes = torch.cat(counts).tolist()
    padded = torch.nn.functional.pad(values, (0, max(sizes) - len(values)))
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
