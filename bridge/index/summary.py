"""Counts of the stored rows and bytes of a trajectory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridge.index.catalog import Catalog
from bridge.index.tables.trajectory_map import TrajectoryMap
from bridge.layout import Part
from bridge.wire import TrajectorySummary

_DIGEST_CHARS = 8


def summarize(catalog: Catalog, name: str) -> TrajectorySummary:
    """Count rows and bytes of one trajectory; a shared row counts in every trajectory."""
    trajectory = catalog.trajectories[name]
    everything = slice(0, len(trajectory))
    locations = {part: catalog.locations(part, trajectory, everything) for part in Part}
    held = {part: locations[part]["block"] >= 0 for part in Part}
    blocks = np.concatenate([locations[part]["block"][held[part]] for part in Part])
    versions = np.unique(catalog.blocks.versions(blocks))
    width = {part: _row_bytes(catalog, trajectory, part) for part in Part}
    due = trajectory.rows >= 0
    due[:-1] = True
    return TrajectorySummary(
        trajectory=name,
        state=trajectory.state,
        tokens=len(trajectory),
        rows=int(held[Part.FORWARD].sum()),
        kv_rows=int(held[Part.KV].sum()),
        missing_forward=int((due & ~held[Part.FORWARD] & (width[Part.FORWARD] > 0)).sum()),
        missing_kv=int((due & ~held[Part.KV] & (width[Part.KV] > 0)).sum()),
        weight_versions=_labels(catalog, versions.tolist()),
        nbytes=sum(int(width[part][held[part]].sum()) for part in Part),
    )


def _labels(catalog: Catalog, versions: list[int]) -> tuple[str, ...]:
    """Return weight labels; a label of several weights appears once per digest."""
    digests: dict[str, list[str]] = {}
    for number in versions:
        known = digests.setdefault(catalog.weight_versions[number], [])
        if catalog.weights[number]:
            known.append(catalog.weights[number][:_DIGEST_CHARS])
    return tuple(
        name
        for label, known in digests.items()
        for name in ([f"{label} ({digest})" for digest in known] if len(known) > 1 else [label])
    )


def _row_bytes(catalog: Catalog, trajectory: TrajectoryMap, part: Part) -> NDArray[np.int64]:
    widths = [engine.hello.layout.row_bytes(part) for engine in catalog.engine_list]
    # Engine -1 indexes the extra entry: a position without a row counts as missing.
    return np.array([*widths, max(widths)], dtype=np.int64)[trajectory.engines]
