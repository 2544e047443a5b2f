"""Position -> (token, engine, row) of one trajectory, and the rule for merging messages.

A rollout that does not continue the trajectory replaces it (`bridge.index.tables.rollouts`). Any
other message merges. On the common prefix the existing rows stay, because they produced the sampled
tokens. A retracted request, a later turn or a resumed rollout computes the same tokens again into
new rows, but these have other activations than those on which the policy acted.

Messages of an engine may arrive out of order. If a full store or a damaged connection refuses a
message, the engine sends it again after newer ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bridge.index.tables.rollouts import Fate, Rollouts
from bridge.wire import Trajectory, TrajectoryState

Number = TypeVar("Number", bound=np.generic)

UNKNOWN_TOKEN = -1
MISSING_ROW = -1
_POSITION_BYTES = 16
_ORIGIN_BYTES = 4
_OBJECT_BYTES = 1280  # the object, its name, three array heads and the first engine's rollouts
_ENGINE_BYTES = 300


@dataclass(slots=True, eq=False)
class TrajectoryMap:
    """tokens int32 [T], engines int32 [T] (index, -1 for none), rows int64 [T] (-1 for none).

    ``rollouts`` has the rollouts of the trajectory. If there are several, ``origins`` int32 [T]
    has the index in ``sources``, (engine, rollout), of each position's source; None: all positions
    are of the first source. ``last`` is the engine of the last message and the highest sequence
    number of that engine's messages. ``entries`` has the store entries of the trajectory's
    messages, ``step`` the RL step and ``updated_at`` the monotonic time of the last one.
    """

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    engines: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    rollouts: Rollouts = field(default_factory=Rollouts)
    sources: list[tuple[int, int]] = field(default_factory=list)
    origins: NDArray[np.int32] | None = None
    state: TrajectoryState = TrajectoryState.OPEN
    revision: int = 0
    last: tuple[int, int] = (-1, -1)
    entries: list[int] = field(default_factory=list)
    step: int = 0
    updated_at: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    def nbytes(self) -> int:
        """Return the approximate bytes of the map."""
        others = 40 * len(self.entries) + _ENGINE_BYTES * len(self.rollouts) + _OBJECT_BYTES
        return self._position_bytes * len(self.tokens) + others

    def growth(self, stop: int) -> int:
        """Return the bytes that new positions up to ``stop`` add."""
        return self._position_bytes * max(0, stop - len(self))

    @property
    def _position_bytes(self) -> int:
        return _POSITION_BYTES + (0 if self.origins is None else _ORIGIN_BYTES)

    def apply(self, message: Trajectory, engine: int, seq: int) -> Fate:
        """Apply a message of ``engine``, the ``seq``-th of its rank; return its fate."""
        fate = self.rollouts.fate(engine, message.rollout, message.continues)
        columns = (message.start, message.tokens, message.rows, engine)
        last_engine, last_seq = self.last
        if fate is Fate.SUPERSEDED:
            return fate
        if fate is Fate.REPLACE:
            self._forget()
        if fate is Fate.BEGIN_BELOW:
            self._begin_below(*columns, message.rollout)
        elif fate is Fate.MERGE and last_engine == engine and seq < last_seq:
            self.merge_late(*columns, message.rollout)
        else:
            self.merge(*columns, message.state, message.rollout)
            self.last = (engine, seq)
        return fate

    def note_entry(self, entry: int, engine: int, rollout: int, fate: Fate) -> list[int]:
        """Add the store entry of a message; return the entries that are no longer needed."""
        needed = self.rollouts.note(engine, rollout, fate, entry)
        gone = [] if fate is not Fate.REPLACE else [e for e in self.entries if e not in needed]
        if gone:
            self.entries = [held for held in self.entries if held in needed]
        self.entries.append(entry)
        return gone

    def merge(
        self,
        start: int,
        tokens_N: NDArray[np.int32],
        rows_N: NDArray[np.int64],
        engine: int,
        state: TrajectoryState,
        rollout: int = 0,
    ) -> None:
        """Merge positions [start, start + N) from ``engine``.

        Before the first token that differs, existing rows stay and new rows fill missing ones. From
        there on the new history replaces the old one to its end.
        """
        stop = start + len(tokens_N)
        known = self.tokens[start:stop]
        reported = tokens_N[: len(known)]
        differs = np.flatnonzero((known != reported) & (known != UNKNOWN_TOKEN))
        common = int(differs[0]) if len(differs) else len(tokens_N)
        self._resize(stop if len(differs) else max(stop, len(self)))
        absent = self.rows[start : start + common] == MISSING_ROW
        fill = np.flatnonzero(absent & (rows_N[:common] != MISSING_ROW))
        self._note_source(start, fill, common, len(tokens_N), (engine, rollout))
        self.rows[start + fill] = rows_N[fill]
        self.engines[start + fill] = engine
        self.tokens[start:stop] = tokens_N
        self.rows[start + common : stop] = rows_N[common:]
        self.engines[start + common : stop] = np.where(rows_N[common:] < 0, -1, engine)
        self.state = state
        self.revision += 1

    def merge_late(
        self,
        start: int,
        tokens_N: NDArray[np.int32],
        rows_N: NDArray[np.int64],
        engine: int,
        rollout: int = 0,
    ) -> None:
        """Merge a message of ``engine`` that is older than one that is merged already.

        The result is the same as if it had arrived in order. Of two rows of the engine for one
        token, the row with the lower number stays, because the engine computed it first. Replaced
        positions do not come back.
        """
        known = self.tokens[start : start + len(tokens_N)]
        reported = tokens_N[: len(known)]
        differs = np.flatnonzero((known != reported) & (known != UNKNOWN_TOKEN))
        if len(differs):
            common = int(differs[0])
        elif start <= len(self):
            common = len(tokens_N)
            self._resize(max(start + common, len(self)))
        else:
            common = 0  # the positions in between may have been replaced
        here = slice(start, start + common)
        rows, held = rows_N[:common], self.rows[here]
        first = (held == MISSING_ROW) | ((self.engines[here] == engine) & (rows < held))
        fill = np.flatnonzero(first & (rows != MISSING_ROW))
        self._note_source(start, fill, common, common, (engine, rollout))
        self.tokens[here] = tokens_N[:common]
        self.rows[start + fill] = rows[fill]
        self.engines[start + fill] = engine
        self.revision += 1

    def _begin_below(
        self,
        start: int,
        tokens_N: NDArray[np.int32],
        rows_N: NDArray[np.int64],
        engine: int,
        rollout: int,
    ) -> None:
        """Merge the first rollout of a trajectory after later rollouts that continue it.

        Of the existing positions only those of the engine's later rollouts stay. If they shared
        positions with a rollout that is replaced now, these rows are missing, never another's.
        """
        sources, origins_T = self.sources, self._origins()
        later = [source == engine and number > rollout for source, number in sources]
        kept_T = np.array(later, dtype=np.bool_)[origins_T]
        end = int(np.flatnonzero(kept_T)[-1]) + 1 if kept_T.any() else 0
        kept_T, origins_T = kept_T[:end], origins_T[:end]
        tokens = np.where(kept_T, self.tokens[:end], UNKNOWN_TOKEN)
        rows = np.where(kept_T, self.rows[:end], MISSING_ROW)
        state, last = self.state, self.last
        self._forget()
        self.merge(start, tokens_N, rows_N, engine, state, rollout)
        if end:
            present = [sources[number] for number in np.unique(origins_T[kept_T]).tolist()]
            below = _resized(self.tokens, end, UNKNOWN_TOKEN)
            self.merge(0, np.where(kept_T, tokens, below), rows, engine, state, present[0][1])
            # Each position keeps the rollout that reported it.
            self.sources += present[1:]
            kept_T &= self._origins()[:end] == 1
            indices = np.array([present.index(s) + 1 if s in present else 0 for s in sources])
            self._origins()[:end][kept_T] = indices[origins_T[kept_T]]
        self.last = last

    def _forget(self) -> None:
        """Forget all positions."""
        self.sources, self.origins = [], None
        self._resize(0)

    def _note_source(
        self,
        start: int,
        fill: NDArray[np.intp],
        common: int,
        count: int,
        source: tuple[int, int],
    ) -> None:
        """Set the source of ``count`` positions; of the first ``common`` only ``fill`` and new."""
        if source not in self.sources:
            self.sources.append(source)
        if len(self.sources) == 1:
            return
        self.origins = self._origins()
        here = self.origins[start : start + count]
        number = self.sources.index(source)
        here[self.tokens[start : start + count] == UNKNOWN_TOKEN] = number
        here[fill] = number
        here[common:] = number

    def _origins(self) -> NDArray[np.int32]:
        """Return the index of each position's source, int32 [T]."""
        return np.zeros(len(self), dtype=np.int32) if self.origins is None else self.origins

    def _resize(self, length: int) -> None:
        self.tokens = _resized(self.tokens, length, UNKNOWN_TOKEN)
        self.engines = _resized(self.engines, length, -1)
        self.rows = _resized(self.rows, length, MISSING_ROW)
        if self.origins is not None:
            self.origins = _resized(self.origins, length, 0)


def _resized(values: NDArray[Number], length: int, fill: int) -> NDArray[Number]:
    out = np.full(length, fill, dtype=values.dtype)
    kept = min(length, len(values))
    out[:kept] = values[:kept]
    return out
