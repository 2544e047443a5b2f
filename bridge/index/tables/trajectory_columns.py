"""All trajectories as one column per attribute, for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from bridge.index.tables.rollouts import ROLLOUT_COLUMNS, Rollouts
from bridge.index.tables.saved import (
    Number,
    Saved,
    Snapshot,
    cut,
    cut_rows,
    integers,
    lengths,
    lists,
    table,
    texts,
)
from bridge.index.tables.trajectory_map import TrajectoryMap
from bridge.wire import TrajectoryState

_STATES = tuple(TrajectoryState)
_STATE_NUMBERS = {state: number for number, state in enumerate(_STATES)}


def snapshot(trajectories: Mapping[str, TrajectoryMap]) -> Snapshot:
    """Return what a checkpoint keeps; ``updated_at`` is left out, because a start resets it.

    ``origins`` has the origins of trajectories with ``has_origins`` 1. ``states`` has indices into
    `TrajectoryState`. Columns of the tables: (engine, rollout) in ``sources``, those of
    `Rollouts.rows` in ``rollouts``, (engine, sequence number) in ``last``.
    """
    maps = list(trajectories.values())
    origins = [each.origins for each in maps if each.origins is not None]
    return {
        "names": texts(trajectories),
        "lengths": lengths(maps),
        "tokens": _joined([each.tokens for each in maps], np.int32),
        "engines": _joined([each.engines for each in maps], np.int32),
        "rows": _joined([each.rows for each in maps], np.int64),
        "has_origins": np.fromiter((each.origins is not None for each in maps), np.int8),
        "origins": _joined(origins, np.int32),
        "source_counts": lengths(each.sources for each in maps),
        "sources": table((source for each in maps for source in each.sources), 2),
        "rollout_counts": lengths(each.rollouts for each in maps),
        "rollouts": table((row for each in maps for row in each.rollouts.rows()), ROLLOUT_COLUMNS),
        "states": np.fromiter((_STATE_NUMBERS[each.state] for each in maps), np.int8),
        "revisions": integers(each.revision for each in maps),
        "last": table((each.last for each in maps), 2),
        "entries": lists([each.entries for each in maps]),
        "steps": integers(each.step for each in maps),
    }


def restore(saved: Saved) -> dict[str, TrajectoryMap]:
    """Return the trajectories of a snapshot."""
    sizes = saved.array("lengths", np.int64)
    columns = zip(
        cut(saved.array("tokens", np.int32), sizes),
        cut(saved.array("engines", np.int32), sizes),
        cut(saved.array("rows", np.int64), sizes),
        _rollouts(saved),
        _sources(saved),
        _origins(saved),
        [_STATES[number] for number in saved.array("states", np.int8).tolist()],
        saved.integers("revisions"),
        map(tuple, saved.table("last", 2).tolist()),
        saved.lists("entries"),
        saved.integers("steps"),
        strict=True,
    )
    names = saved.texts("names")
    return {name: TrajectoryMap(*values) for name, values in zip(names, columns, strict=True)}


def _joined(arrays: list[NDArray[Number]], kind: type[Number]) -> NDArray[Number]:
    return np.concatenate([np.empty(0, kind), *arrays])


def _rollouts(saved: Saved) -> Iterator[Rollouts]:
    rows = saved.table("rollouts", ROLLOUT_COLUMNS)
    return map(Rollouts.restore, cut_rows(rows, saved.array("rollout_counts", np.int64)))


def _sources(saved: Saved) -> Iterator[list[tuple[int, int]]]:
    sources = cut_rows(saved.table("sources", 2), saved.array("source_counts", np.int64))
    return ([(engine, rollout) for engine, rollout in rows] for rows in sources)


def _origins(saved: Saved) -> list[NDArray[np.int32] | None]:
    """Return the origins of every trajectory, one per position, or None."""
    has_N = saved.array("has_origins", np.int8) > 0
    sizes = saved.array("lengths", np.int64)[has_N]
    found = iter(cut(saved.array("origins", np.int32), sizes))
    return [next(found) if has else None for has in has_N.tolist()]
