"""What the scheduler's thread hands to the shipper's thread, in order.

Shape legend: n rows, B bytes of a row, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.layout import Part
from bridge.wire import TrajectoryState


@dataclass(frozen=True)
class RowsEvent:
    """Records of rows int64 [n]; `encode` returns them as uint8 [n, B] on the shipper's thread.

    What it returns may lie on a GPU, and is there once `made` has happened.
    """

    part: Part
    rows_n: Tensor
    weight_version: str
    encode: Callable[[], Tensor]
    nbytes: int
    made: torch.cuda.Event | None = None


@dataclass(frozen=True)
class TrajectoryEvent:
    """Tokens int32 [T] of a trajectory from position 0 and the row int64 [T] that consumed each.

    The rows may lie on a GPU, and are there once `made` has happened.
    """

    trajectory: str
    tokens_T: Tensor
    rows_T: Tensor
    state: TrajectoryState
    nbytes: int
    made: torch.cuda.Event | None = None


@dataclass(frozen=True)
class DigestsEvent:
    """Digests of the expert weights under their Hugging Face names."""

    weight_version: str
    digests: Mapping[str, str]
    nbytes: int


Event = RowsEvent | TrajectoryEvent | DigestsEvent
