"""Which trajectories and blocks a policy evicts.

The policy evicts a block if it is old and no remaining trajectory refers to it. Age counts in RL
steps or weight versions (`bridge.index.aging`). References alone are not enough: no trajectory
refers to the rows of a running request before it has finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge.index.aging import ages
from bridge.index.catalog import Catalog
from bridge.wire import Policy, TrajectoryState


@dataclass(frozen=True, slots=True)
class Garbage:
    """Names of trajectories and numbers of blocks to evict, and the steps that are too old."""

    trajectories: list[str]
    blocks: NDArray[np.int64]
    steps: Set[int]


def garbage(catalog: Catalog, policy: Policy, pinned: Set[str], now: float) -> Garbage:
    """Return what the policy evicts at monotonic time ``now``; ``pinned`` trajectories stay."""
    old_steps = frozenset[int]() if policy.keep is None else catalog.steps.behind(policy.keep)
    gone = [
        name
        for name, trajectory in catalog.trajectories.items()
        if name not in pinned
        and (
            trajectory.step in old_steps
            or (
                policy.expire_s is not None
                and trajectory.state is TrajectoryState.OPEN
                and now - trajectory.updated_at >= policy.expire_s
            )
        )
    ]
    numbers, blocks = catalog.blocks.held()
    stays = set(catalog.trajectories).difference(gone)
    candidates = numbers[np.isin(blocks["step"], list(old_steps))]
    old = candidates[~np.isin(candidates, _referred(catalog, stays, bool(len(candidates))))]
    stale = numbers[_too_far_behind(catalog, blocks["version"], policy.max_version_diff)]
    stale = stale[~np.isin(stale, _referred(catalog, pinned & stays, bool(len(stale))))]
    if len(stale):
        gone += [
            name
            for name in stays
            if _all_within(catalog.blocks_of(catalog.trajectories[name]), stale)
        ]
    return Garbage(gone, np.union1d(old, stale), old_steps)


def _referred(catalog: Catalog, names: Iterable[str], needed: bool) -> NDArray[np.int64]:
    """Return the numbers of the blocks that these trajectories refer to, if ``needed``."""
    found = [catalog.blocks_of(catalog.trajectories[name]) for name in names] if needed else []
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)


def _all_within(blocks: NDArray[np.int64], evicted: NDArray[np.int64]) -> bool:
    return len(blocks) > 0 and bool(np.isin(blocks, evicted).all())


def _too_far_behind(
    catalog: Catalog, versions_B: NDArray[np.int32], max_diff: int | None
) -> NDArray[np.bool_]:
    if max_diff is None or not catalog.weight_versions:
        return np.zeros(len(versions_B), dtype=np.bool_)
    return np.isin(versions_B, [n for n, age in _version_ages(catalog) if age > max_diff])


def _version_ages(catalog: Catalog) -> Iterator[tuple[int, int]]:
    """Yield (number, age) of the weight versions, by value if all labels are numbers.

    Otherwise the order counts in which engines first used them. Weights with one label have one
    age, whatever their digests are.
    """
    used = list(catalog.versions_used)
    names = [catalog.weight_versions[number] for number in used]
    by_value = all(name.isdecimal() for name in names)
    first = {name: at for at, name in reversed([*enumerate(catalog.weight_versions)])}
    values = [int(name) if by_value else first[name] for name in names]
    return zip(used, ages(values), strict=True)
