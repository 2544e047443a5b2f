"""Record rows put in the order of the model's tokens, with the state of every token.

Shape legend: N tokens of the micro-batch in model order, P positions of one sequence, W bytes a
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bridge.errors import TokenMismatch, TraceError, WeightVersionMismatch
from bridge.layout import Part, RecordLayout
from megatron_trace.records.token_placement import TokenPlacement
from megatron_trace.rounding.rows import RowState

if TYPE_CHECKING:
    from bridge.client.records import TrajectoryRecords


class SequenceCountMismatch(TraceError):
    """There is not one record (or None) for each sequence."""


@dataclass(frozen=True)
class VersionPolicy:
    """Which weight versions the trainer accepts.

    trainer   the trainer's version; None accepts any
    max_lag   how much smaller a row's version may be, both being integers
    strict    refuse other versions; otherwise their rows count as missing
    """

    trainer: str | None
    max_lag: int
    strict: bool

    def accepts(self, version: str) -> bool:
        """Say whether rows of `version` may guide the trainer."""
        if self.trainer is None or version == self.trainer:
            return True
        if not (version.isdecimal() and self.trainer.isdecimal()):
            return False
        return 0 <= int(self.trainer) - int(version) <= self.max_lag


@dataclass(frozen=True)
class AlignedRows:
    """Rows in model order; a row without a record is zero and its state says so.

    forward_rows, kv_rows      uint8 [N, W]
    forward_state, kv_state    uint8 [N], `RowState`
    """

    forward_rows: Tensor
    kv_rows: Tensor
    forward_state: Tensor
    kv_state: Tensor

    @property
    def num_tokens(self) -> int:
        """N, padding included."""
        return len(self.forward_state)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.forward_rows.device

    def of(self, part: Part) -> Tensor:
        """Return the rows of one part."""
        return self.forward_rows if part is Part.FORWARD else self.kv_rows

    def state_of(self, part: Part) -> Tensor:
        """Return the tokens' states of one part."""
        return self.forward_state if part is Part.FORWARD else self.kv_state

    def to(self, device: torch.device | str) -> AlignedRows:
        """Copy the rows to `device`; to a GPU from pinned memory, without waiting for the copy."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if torch.device(device).type == "cuda" and not self.forward_rows.is_cuda:
            fields = {name: rows.pin_memory() for name, rows in fields.items()}
        return replace(
            self, **{name: rows.to(device, non_blocking=True) for name, rows in fields.items()}
        )


def align_rows(
    records: Sequence[TrajectoryRecords | None],
    layout: RecordLayout,
    placement: TokenPlacement,
    versions: VersionPolicy,
) -> AlignedRows:
    """Put every sequence's rows where the model will compute its tokens.

    Raises:
        SequenceCountMismatch: if there is not one record for each sequence.
        TokenMismatch: if a trajectory holds other tokens.
        WeightVersionMismatch: if a row's version is not accepted and the policy is strict.
    """
    if len(records) != len(placement.sequences):
        raise SequenceCountMismatch(
            f"{len(records)} records were passed for {len(placement.sequences)} sequences: "
            "pass one for each sequence, None where nothing was recorded, and pad_sequence=True if "
            "the last sequence of cu_seqlens is padding."
        )
    n = len(placement.tokens)
    placed = AlignedRows(
        torch.zeros(n, layout.row_bytes(Part.FORWARD), dtype=torch.uint8),
        torch.zeros(n, layout.row_bytes(Part.KV), dtype=torch.uint8),
        torch.full((n,), RowState.PADDING, dtype=torch.uint8),
        torch.full((n,), RowState.PADDING, dtype=torch.uint8),
    )
    for record, places_P in zip(records, placement.sequences, strict=True):
        here_P = places_P[places_P >= 0]
        placed.forward_state[here_P] = RowState.MISSING
        placed.kv_state[here_P] = RowState.MISSING
        if record is not None:
            _check_tokens(record, placement.tokens, places_P)
            _place(record, places_P, placed, _accepted(record, versions))
    return placed


def check_one_meaning(records: Sequence[TrajectoryRecords | None]) -> None:
    """Refuse records in which one weight version stands for two different weights.

    SGLang calls weights "default" until somebody names them, so two servers with other weights have
    the same label; the digest that comes with it is of the weights themselves.

    Raises:
        WeightVersionMismatch: naming the label and two trajectories.
    """
    first: dict[str, tuple[str, str]] = {}
    for record in records:
        if record is None:
            continue
        for label, digest in zip(record.weight_versions, record.weights, strict=False):
            if not digest:
                continue  # an engine that does not know it
            known, name = first.setdefault(label, (digest, record.trajectory))
            if digest != known:
                raise WeightVersionMismatch(
                    f"Trajectories {name!r} and {record.trajectory!r} were computed with different "
                    f"weights that are both called {label!r}: name the weights of every server and "
                    "of every update (--weight-version), and generate again."
                )


def _place(
    record: TrajectoryRecords, places_P: Tensor, placed: AlignedRows, accepted: Tensor
) -> None:
    """Copy the rows of the positions that record and sequence share."""
    count = min(len(places_P) - record.start, len(record.tokens))
    if count <= 0:
        return
    places = places_P[record.start : record.start + count]
    parts = (
        (record.forward, record.forward_valid, placed.forward_rows, placed.forward_state),
        (record.kv, record.kv_valid, placed.kv_rows, placed.kv_state),
    )
    for rows, valid, rows_NW, state_N in parts:
        recorded = valid[:count] & accepted[:count]
        held = recorded & (places >= 0)
        rows_NW[places[held]] = rows[:count][held]
        state_N[places[held]] = RowState.RECORDED
        is_last = record.start + count == record.length and places[-1] >= 0
        if is_last and not recorded[-1]:
            # The last sampled token was never consumed: it has no row, and none is missing.
            state_N[places[-1]] = RowState.PADDING


def _check_tokens(record: TrajectoryRecords, tokens_N: Tensor, places_P: Tensor) -> None:
    places = places_P[record.start :]
    count = min(len(places), len(record.tokens))
    places, theirs = places[:count], record.tokens[:count]
    ours = tokens_N[places]
    # -1: no engine reported the token, or another rank computes it
    differs = (ours != theirs) & (theirs >= 0) & (places >= 0)
    if bool(differs.any()):
        place = int(differs.nonzero()[0])
        raise TokenMismatch(
            f"Trajectory {record.trajectory!r} has token {int(theirs[place])} at position "
            f"{record.start + place}, the trainer has {int(ours[place])}: pass the sequences in "
            "the order of the records, tokenized as the rollout saw them."
        )


def _accepted(record: TrajectoryRecords, versions: VersionPolicy) -> Tensor:
    """Say for every position whether its weight version is accepted: bool [T]."""
    # The last entry answers for index -1, positions without a row.
    accepts = torch.tensor([*map(versions.accepts, record.weight_versions), True])
    accepted = accepts[record.weight_version_index.to(torch.int64)]
    if versions.strict and not bool(accepted.all()):
        place = int((~accepted).nonzero()[0])
        version = record.weight_versions[int(record.weight_version_index[place])]
        raise WeightVersionMismatch(
            f"Trajectory {record.trajectory!r} was computed with weight version {version!r} at "
            f"position {record.start + place}, the trainer holds {versions.trainer!r}: generate "
            "again after the weight update, or allow a max_version_lag."
        )
    return accepted
