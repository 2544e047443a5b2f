"""Which trajectories and blocks a policy gives up.

A block goes when it is old and no trajectory that stays refers to it. Age is counted in RL steps or
weight versions and not in references alone, because the rows of a request that still runs are
referred to only once it has finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge.index.catalog import Catalog
from bridge.wire import Policy, TrajectoryState


@dataclass(frozen=True, slots=True)
class Garbage:
    """Names of trajectories and numbers of blocks to forget, and the first step that is kept."""

    trajectories: list[str]
    blocks: NDArray[np.int64]
    first_step: int


def garbage(catalog: Catalog, policy: Policy, pinned: Set[str], now: float) -> Garbage:
    """Return what the policy gives up at monotonic time ``now``; ``pinned`` trajectories stay."""
    first_step = 0 if policy.keep is None else catalog.step - policy.keep + 1
    gone = [
        name
        for name, trajectory in catalog.trajectories.items()
        if name not in pinned
        and (
            trajectory.step < first_step
            or (
                policy.expire_s is not None
                and trajectory.state is TrajectoryState.OPEN
                and now - trajectory.told_at >= policy.expire_s
            )
        )
    ]
    numbers, blocks = catalog.blocks.held()
    stays = set(catalog.trajectories).difference(gone)
    candidates = numbers[blocks["step"] < first_step]
    old = candidates[~np.isin(candidates, _referred(catalog, stays, bool(len(candidates))))]
    stale = numbers[_too_far_behind(catalog, blocks["version"], policy.max_version_diff)]
    stale = stale[~np.isin(stale, _referred(catalog, pinned & stays, bool(len(stale))))]
    if len(stale):
        gone += [
            name
            for name in stays
            if _all_within(catalog.blocks_of(catalog.trajectories[name]), stale)
        ]
    return Garbage(gone, np.union1d(old, stale), first_step)


def _referred(catalog: Catalog, names: Iterable[str], wanted: bool) -> NDArray[np.int64]:
    """Return the numbers of the blocks that these trajectories refer to, if ``wanted``."""
    found = [catalog.blocks_of(catalog.trajectories[name]) for name in names] if wanted else []
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)


def _all_within(blocks: NDArray[np.int64], given_up: NDArray[np.int64]) -> bool:
    return len(blocks) > 0 and bool(np.isin(blocks, given_up).all())


def _too_far_behind(
    catalog: Catalog, versions_B: NDArray[np.int32], most: int | None
) -> NDArray[np.bool_]:
    if most is None or not catalog.weight_versions:
        return np.zeros(len(versions_B), dtype=np.bool_)
    ages = _ages(catalog.weight_versions)
    return ages[versions_B] > most


def _ages(versions: list[str]) -> NDArray[np.int64]:
    """Return how far each version is behind the newest: by value if all are numbers, else by order.

    The order is that in which engines first computed with them.
    """
    ordered = all(version.isdecimal() for version in versions)
    order = [int(version) for version in versions] if ordered else list(range(len(versions)))
    newest = max(order)
    return np.array([min(newest - place, 1 << 62) for place in order], dtype=np.int64)
