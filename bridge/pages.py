"""Join the pages of one trajectory into tensors, each byte copied once.

Shapes: T = positions asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridge.records import TrajectoryRecords
from bridge.wire import FetchReply


def join(pages: Sequence[FetchReply]) -> TrajectoryRecords:
    """Return the records of consecutive pages (one at least) of one revision of a trajectory."""
    first = pages[0]
    weight_versions, versions_T = _joined_table(
        [(page.weight_versions, page.versions) for page in pages]
    )
    engine_ids, engines_T = _joined_table([(page.engine_ids, page.engines) for page in pages])
    return TrajectoryRecords(
        trajectory=first.trajectory,
        state=first.state,
        start=first.start,
        length=first.length,
        layout=first.layout,
        kv_scales=first.kv_scales,
        tokens=_joined([page.tokens for page in pages]),
        forward=_joined([page.forward for page in pages]),
        forward_valid=_joined([page.forward_valid for page in pages]),
        kv=_joined([page.kv for page in pages]),
        kv_valid=_joined([page.kv_valid for page in pages]),
        weight_versions=weight_versions,
        weight_version_index=_joined([versions_T]),
        engine_ids=engine_ids,
        engine_index=_joined([engines_T]),
    )


def _joined(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _joined_table(
    tables: Sequence[tuple[tuple[str, ...], NDArray[np.int32]]],
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return one name table and the index into it; -1 stays -1."""
    names = tuple(dict.fromkeys(name for table, _ in tables for name in table))
    place = {name: index for index, name in enumerate(names)}
    # The last entry is what index -1 finds.
    moved = [
        np.array([*(place[name] for name in table), -1], dtype=np.int32)[index_T]
        for table, index_T in tables
    ]
    return names, np.concatenate(moved)
