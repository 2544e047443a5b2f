"""What the scheduler's thread hands to the shipper's thread, in order.

Shape legend: n rows, B bytes of a row, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bridge.layout import Part
from bridge.wire import TrajectoryState
from sglang_trace.weights.versions import Weights

if TYPE_CHECKING:
    # Triton, which a host without a GPU does not need.
    from sglang_trace.kernels.kv.gather_rows import DueRows


@dataclass(frozen=True)
class RowsEvent:
    """Records of rows int64 [n]; `encode` returns them as uint8 [n, B] on the shipper's thread.

    Its result may be on a GPU, which has written it once `ready` has happened.
    """

    part: Part
    rows_n: Tensor
    weights: Weights
    encode: Callable[[], Tensor]
    nbytes: int
    ready: torch.cuda.Event | None = None


@dataclass(frozen=True)
class DueRowsEvent:
    """K and V records gathered on a GPU; only the GPU knows how many there are.

    The GPU has written them once `ready` has happened. `split` sorts row numbers int64 [n] by their
    weights; it is called on the shipper's thread, and what it says of a computed row never changes.
    """

    due: DueRows
    split: Callable[[Tensor], Iterable[tuple[Weights, Tensor]]]
    nbytes: int
    ready: torch.cuda.Event | None

    def dropped(self) -> DroppedEvent:
        """Return the event that reports the records as dropped."""
        return DroppedEvent(Part.KV, self.due.count_1, self.due.count_1.nbytes, self.ready)


@dataclass(frozen=True)
class DroppedEvent:
    """Records that were not queued; `count_1`, int64 [1] on the device, is their number."""

    part: Part
    count_1: Tensor
    nbytes: int
    ready: torch.cuda.Event | None


@dataclass(frozen=True)
class TrajectoryEvent:
    """Tokens int32 [T] of a trajectory from position 0 and the row int64 [T] that consumed each.

    The rows may be on a GPU, which has written them once `ready` has happened. `rollout` and
    `continues` are the number and the kind of the request (`sglang_trace.requests.rollouts`).
    """

    trajectory: str
    tokens_T: Tensor
    rows_T: Tensor
    state: TrajectoryState
    nbytes: int
    ready: torch.cuda.Event | None = None
    rollout: int = 0
    continues: bool = False


@dataclass(frozen=True)
class DigestsEvent:
    """Digests of the expert weights under their Hugging Face names."""

    weight_version: str
    digests: Mapping[str, str]
    nbytes: int


Event = RowsEvent | DueRowsEvent | DroppedEvent | TrajectoryEvent | DigestsEvent
