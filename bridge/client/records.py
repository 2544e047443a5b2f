"""The records of a trajectory, as a trainer gets them.

Shape legend: T = positions, F / K = bytes of a forward / kv row of ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.layout import RecordLayout
from bridge.wire import TrajectoryState

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrajectoryRecords:
    """Records of positions [start, start + T) of a trajectory.

    The row at a position is the computation that consumed the token there and produced the logits
    of the next token; the last sampled token has none. Where ``valid`` is false the row is missing
    and its bytes are zero.

    Attributes:
        trajectory: its name.
        state: as last reported by an engine.
        start: absolute position of index 0.
        length: tokens of the whole trajectory, whatever was requested.
        layout: what the columns of forward and kv are; reduced to the requested layers and sites.
        kv_scales: attention layer -> global (K, V) scale; absent layers have 1.0.
        tokens: int32 [T]; -1 where no engine reported the token.
        forward: uint8 [T, F].
        forward_valid: bool [T].
        kv: uint8 [T, K].
        kv_valid: bool [T].
        weight_versions: the labels of the weights that occur.
        weights: the digest of the weights of each label, "" where the engine gave none.
        weight_version_index: int32 [T] into weight_versions, -1 where no row is recorded.
        engine_ids: the engines that occur.
        engine_index: int32 [T] into engine_ids, -1 where there is no row.
        rows: int64 [T], the engine's number of the row at each position, -1 where it reported none.
        revision: changes whenever the trajectory changes.
    """

    trajectory: str
    state: TrajectoryState
    start: int
    length: int
    layout: RecordLayout
    kv_scales: Mapping[int, tuple[float, float]]
    tokens: Tensor
    forward: Tensor
    forward_valid: Tensor
    kv: Tensor
    kv_valid: Tensor
    weight_versions: tuple[str, ...]
    weight_version_index: Tensor
    engine_ids: tuple[str, ...]
    engine_index: Tensor
    rows: Tensor
    revision: int
    weights: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def missing(self) -> Tensor:
        """Return the positions whose row was reported but is not complete: bool [T].

        Such rows are lost or in flight. An engine's ranks and bridges do not wait for each other,
        so a trajectory may finish a moment before all shards of its rows have arrived.
        """
        import torch

        missing = torch.zeros(len(self), dtype=torch.bool)
        for rows, valid in ((self.forward, self.forward_valid), (self.kv, self.kv_valid)):
            if rows.shape[1]:
                missing |= ~valid
        return missing & (self.rows >= 0)
