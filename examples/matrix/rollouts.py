"""Whether runs that should not differ do not: the same seed on other versions of an upstream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from examples.demo import rollout
from examples.matrix.combination import Outcome

OTHER = {"sglang": "megatron-core", "megatron-core": "sglang"}


@dataclass(frozen=True)
class Comparison:
    """Runs that share one upstream's version and differ in the other's.

    rollout   the same tokens, log-probabilities and prefix-cache hits
    records   the same bits in the bridge
    trainer   the same guided and unguided log-probabilities (their gap's summary), loss and
              gradient norm
    required  a trainer's release cannot change what was sampled before it ran; another release of
              SGLang may draw other random numbers from the same seed, and then all three differ
    """

    shared: str
    versions: tuple[str, ...]
    rollout: bool
    records: bool
    trainer: bool
    required: bool

    @property
    def passed(self) -> bool:
        """Rollout and records are the same where they must be."""
        return (self.rollout and self.records) or not self.required


def compare(outcomes: Sequence[Outcome]) -> Iterator[Comparison]:
    """One comparison for every version that was run with two versions of the other upstream."""
    complete = [(o, o.report) for o in outcomes if o.report is not None]
    for name, other in OTHER.items():
        for version in sorted({o.combination.versions[name] for o, _ in complete}):
            mine = [(o, r) for o, r in complete if o.combination.versions[name] == version]
            if len(mine) > 1:
                yield Comparison(
                    shared=f"{name} {version}",
                    versions=tuple(o.combination.versions[other] for o, _ in mine),
                    rollout=_same(lambda o, _: rollout.load(o.out / "rollout-step.json"), mine),
                    records=_same(lambda _, r: r["records"]["digest"], mine),
                    trainer=_same(lambda _, r: (r["logprob_gap"], r["grpo_step"]), mine),
                    required=name == "sglang",
                )


def _same(
    of: Callable[[Outcome, dict[str, Any]], object], runs: Sequence[tuple[Outcome, dict[str, Any]]]
) -> bool:
    first, *others = (of(*each) for each in runs)
    return all(each == first for each in others)
