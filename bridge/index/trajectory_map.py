"""Position -> (token, engine, row) of one trajectory, and the rule by which messages merge.

Why existing entries win on the common prefix: their rows produced the tokens that were sampled.
A retracted request, a later turn or a resumed rollout computes the same tokens again into new
rows; those are other activations than the ones the policy acted on.

Messages of an engine can arrive in another order than it sent them: what a full store or a damaged
connection refused is sent again after what it took meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bridge.wire import TrajectoryState

Number = TypeVar("Number", bound=np.generic)

UNKNOWN_TOKEN = -1
MISSING_ROW = -1
_POSITION_BYTES = 16
_OBJECT_BYTES = 1024  # the object, its name and three array heads


class TrajectoryMap:
    """tokens int32 [T], engines int32 [T] (index, -1 for none), rows int64 [T] (-1 for none).

    ``last`` is the engine that told it last and the highest sequence number of what it told.
    ``entries`` are the store's entries that told it, ``step`` the RL step and ``told_at`` the
    monotonic time of the last of them.
    """

    def __init__(self) -> None:
        self.tokens: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.engines: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.state = TrajectoryState.OPEN
        self.revision = 0
        self.last = (-1, -1)
        self.entries: list[int] = []
        self.step = 0
        self.told_at = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    def nbytes(self) -> int:
        """Return the memory that the map takes, about."""
        return _POSITION_BYTES * len(self.tokens) + 40 * len(self.entries) + _OBJECT_BYTES

    def growth(self, stop: int) -> int:
        """Return the memory that positions up to ``stop`` would take beyond those there are."""
        return _POSITION_BYTES * max(0, stop - len(self))

    def merge(
        self,
        start: int,
        tokens_N: NDArray[np.int32],
        rows_N: NDArray[np.int64],
        engine: int,
        state: TrajectoryState,
    ) -> None:
        """Merge positions [start, start + N) told by ``engine``.

        Up to the first token that differs, recorded rows stay and only absent ones are filled in;
        from there on the new history replaces the old one to its end.
        """
        stop = start + len(tokens_N)
        known = self.tokens[start:stop]
        told = tokens_N[: len(known)]
        differs = np.flatnonzero((known != told) & (known != UNKNOWN_TOKEN))
        common = int(differs[0]) if len(differs) else len(tokens_N)
        self._resize(stop if len(differs) else max(stop, len(self)))
        absent = self.rows[start : start + common] == MISSING_ROW
        fill = np.flatnonzero(absent & (rows_N[:common] != MISSING_ROW))
        self.rows[start + fill] = rows_N[fill]
        self.engines[start + fill] = engine
        self.tokens[start:stop] = tokens_N
        self.rows[start + common : stop] = rows_N[common:]
        self.engines[start + common : stop] = np.where(rows_N[common:] < 0, -1, engine)
        self.state = state
        self.revision += 1

    def merge_late(
        self, start: int, tokens_N: NDArray[np.int32], rows_N: NDArray[np.int64], engine: int
    ) -> None:
        """Merge what ``engine`` sent before something that is merged already.

        As if it had come in time: of two rows of the engine for one token the one computed first
        stays, which has the lower number. Nothing that was replaced since comes back.
        """
        known = self.tokens[start : start + len(tokens_N)]
        told = tokens_N[: len(known)]
        differs = np.flatnonzero((known != told) & (known != UNKNOWN_TOKEN))
        if len(differs):
            common = int(differs[0])
        elif start <= len(self):
            common = len(tokens_N)
            self._resize(max(start + common, len(self)))
        else:
            common = 0  # what stands in between may have been replaced
        here = slice(start, start + common)
        rows, held = rows_N[:common], self.rows[here]
        first = (held == MISSING_ROW) | ((self.engines[here] == engine) & (rows < held))
        fill = np.flatnonzero(first & (rows != MISSING_ROW))
        self.tokens[here] = tokens_N[:common]
        self.rows[start + fill] = rows[fill]
        self.engines[start + fill] = engine
        self.revision += 1

    def _resize(self, length: int) -> None:
        self.tokens = _resized(self.tokens, length, UNKNOWN_TOKEN)
        self.engines = _resized(self.engines, length, -1)
        self.rows = _resized(self.rows, length, MISSING_ROW)


@dataclass(frozen=True, slots=True)
class TrajectoryColumns:
    """Many trajectories attribute by attribute, as a checkpoint keeps them.

    An attribute that is an array is one array for all, end to end, and has their ``lengths``.
    """

    names: list[str]
    attributes: dict[str, Any]
    lengths: dict[str, NDArray[np.int64]]

    @classmethod
    def of(cls, trajectories: Mapping[str, TrajectoryMap]) -> Self:
        """Take trajectories apart."""
        maps = [vars(trajectory) for trajectory in trajectories.values()]
        attributes: dict[str, Any] = {}
        lengths: dict[str, NDArray[np.int64]] = {}
        for name in maps[0] if maps else ():
            values = [each[name] for each in maps]
            if isinstance(values[0], np.ndarray):
                lengths[name] = np.fromiter(map(len, values), np.int64, len(values))
                attributes[name] = np.concatenate(values)
            else:
                attributes[name] = values
        return cls(list(trajectories), attributes, lengths)

    def trajectories(self) -> dict[str, TrajectoryMap]:
        """Put the trajectories together again."""
        columns = {
            name: _cut(values, self.lengths[name]) if name in self.lengths else values
            for name, values in self.attributes.items()
        }
        found = {}
        for name, *values in zip(self.names, *columns.values(), strict=True):
            trajectory = found[name] = TrajectoryMap.__new__(TrajectoryMap)
            trajectory.__dict__.update(zip(columns, values, strict=True))
        return found


def _cut(values: NDArray[Number], lengths: NDArray[np.int64]) -> list[NDArray[Number]]:
    ends = np.cumsum(lengths).tolist()
    return [values[begin:end].copy() for begin, end in pairwise([0, *ends])]


def _resized(values: NDArray[Number], length: int, fill: int) -> NDArray[Number]:
    out = np.full(length, fill, dtype=values.dtype)
    kept = min(length, len(values))
    out[:kept] = values[:kept]
    return out
