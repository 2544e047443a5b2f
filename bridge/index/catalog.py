"""Everything the daemon knows but the record bytes, built by applying messages one by one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.index.aging import LastUsed
from bridge.index.engine import Engine, registration_bytes, unknown_engine
from bridge.index.pins import Pins
from bridge.index.step_log import StepLog
from bridge.index.tables import trajectory_columns
from bridge.index.tables.block_table import BlockTable
from bridge.index.tables.digest_table import DigestTable, digest_bytes
from bridge.index.tables.rollouts import Fate
from bridge.index.tables.row_map import absent_places
from bridge.index.tables.runs import group_indices
from bridge.index.tables.saved import Saved, Snapshot, integers, texts
from bridge.index.tables.sizes import text_bytes
from bridge.index.tables.trajectory_map import TrajectoryMap
from bridge.layout import Part
from bridge.wire import (
    Dropped,
    Hello,
    Pin,
    RowsHeader,
    Step,
    Trajectory,
    TrajectoryState,
    WeightDigests,
)

Told = Hello | RowsHeader | Trajectory | WeightDigests | Dropped | Step
Journaled = Told | Pin
PARTS = tuple(Part)
_OBJECT_BYTES = 200


class Catalog:
    """Engines, trajectories, blocks of rows, weight versions and digests.

    ``states`` counts the trajectories held and ``collected`` those given up, by their state.
    ``weight_versions`` and ``weights`` are label and digest of the weights of each number.
    ``versions_used`` has the numbers of weight versions by when rows of them were last told of.
    ``superseded`` are entries of the store that say nothing any more: whoever drops them clears it.
    """

    def __init__(self) -> None:
        self.steps = StepLog()
        self.versions_used = LastUsed()
        self.pins = Pins()
        self.superseded: list[int] = []
        self.engines: dict[str, Engine] = {}
        self.engine_list: list[Engine] = []
        self.trajectories: dict[str, TrajectoryMap] = {}
        self.states = Counter(dict.fromkeys(TrajectoryState, 0))
        self.collected = Counter(dict.fromkeys(TrajectoryState, 0))
        self.blocks = BlockTable()
        self.weight_versions: list[str] = []
        self.weights: list[str] = []
        self.digests = DigestTable()
        self._version_numbers: dict[tuple[str, str], int] = {}
        self._trajectory_bytes = 0
        self._name_bytes = 0

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: nothing that follows from the rest or `begin_anew` sets.

        The number of an engine or of a weight version is its place.
        """
        return {
            "steps": self.steps.snapshot(),
            "versions_used": self.versions_used.snapshot(),
            "pins": self.pins.snapshot(),
            "superseded": integers(self.superseded),
            "engines": [engine.snapshot() for engine in self.engine_list],
            "trajectories": trajectory_columns.snapshot(self.trajectories),
            "blocks": self.blocks.snapshot(),
            "weight_versions": texts(self.weight_versions),
            "weights": texts(self.weights),
            "digests": self.digests.snapshot(),
        }

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Make again what gave a snapshot; `begin_anew` comes next."""
        made = cls()
        made.steps = StepLog.restore(saved.part("steps"))
        made.versions_used = LastUsed.restore(saved.integers("versions_used"))
        made.pins = Pins.restore(saved.part("pins"))
        made.superseded = saved.integers("superseded")
        hellos: dict[bytes, Hello] = {}
        for number, engine in enumerate(saved.parts("engines")):
            made._hold_engine(Engine.restore(number, engine, hellos))
        made._hold_trajectories(trajectory_columns.restore(saved.part("trajectories")))
        made.blocks = BlockTable.restore(saved.part("blocks"))
        for version in zip(saved.texts("weight_versions"), saved.texts("weights"), strict=True):
            made._hold_version(*version)
        made.digests = DigestTable.restore(saved.part("digests"))
        return made

    @property
    def step(self) -> int:
        """The RL step that what is told now belongs to."""
        return self.steps.current

    def check(self, told: Journaled) -> None:
        """Raise UnknownEngine, EngineIdTaken or SchemaMismatch if it cannot be applied."""
        if isinstance(told, Step | Pin):
            return
        engine = self.engines.get(told.engine_id)
        if isinstance(told, Hello):
            if engine is not None:
                engine.check_hello(told)
            return
        if engine is None:
            raise unknown_engine(told)
        engine.check_sender(told)
        if isinstance(told, RowsHeader):
            engine.check_block(told)

    def seen(self, told: Told, seq: int) -> bool:
        """Whether a rank's message with this sequence number has been applied before.

        Or says nothing new: a rank that is known, a count that is no higher, a step that has begun.
        """
        if isinstance(told, Step):
            return self.steps.has_begun(told.step)
        engine = self.engines.get(told.engine_id)
        if engine is None:
            return False
        match told:
            case Hello():
                return told.shard in engine.incarnations
            case Dropped():
                return engine.has_told_dropped(told)
        return seq in engine.accepted[told.shard]

    def apply(self, told: Journaled, seq: int, number: int) -> None:
        """Apply a checked message that the store holds as entry ``number``."""
        if isinstance(told, Step):
            self.steps.begin(told.step, number)
            return
        if isinstance(told, Pin):
            for name in told.trajectories:
                self.superseded += self.pins.put(name, told.lease_s, number, time.monotonic())
            return
        if isinstance(told, Hello):
            self._add_engine(told)
        engine = self.engines[told.engine_id]
        if isinstance(told, Dropped):
            self.superseded += engine.tell_dropped(told, number)
            return
        engine.accepted[told.shard].add(seq)
        match told:
            case RowsHeader():
                version = self._version_number(told)
                self.versions_used.use(version)
                part = PARTS.index(told.part)
                self.blocks.put(number, engine.number, part, version, self.step, told.row_bytes)
                engine.place(told, number)
            case Trajectory():
                self._merge(told, engine, seq, number)
            case WeightDigests():
                self.digests.put(told, number, self.step)

    def version_of(self, block: RowsHeader) -> int:
        """Return the number of a block's weights, by label and digest; -1 if they are new."""
        return self._version_numbers.get((block.weight_version, block.weights), -1)

    def growth(self, told: Told) -> int:
        """Return the memory that applying a checked message would add to the index, about.

        A row number or a position far from those before takes much more than it has bytes.
        """
        match told:
            case Hello():
                return 0 if told.engine_id in self.engines else registration_bytes(told)
            case RowsHeader():
                rows = self.engines[told.engine_id].maps[told.part]
                return rows.growth(told.rows, is_run=told.extent.is_run)
            case Trajectory():
                known = self.trajectories.get(told.trajectory) or TrajectoryMap()
                return known.growth(told.start + len(told.tokens))
            case WeightDigests():
                return digest_bytes(told.digests)
        return 0

    def places(self, part: Part, trajectory: TrajectoryMap, page: slice) -> NDArray[np.void]:
        """Return where the complete rows of the positions in ``page`` are, as PLACE [T].

        A row that several ranks share is at the place of its first rank's bytes.
        """
        engines_T, rows_T = trajectory.engines[page], trajectory.rows[page]
        places_T = absent_places(len(rows_T))
        for number, at in group_indices(engines_T):
            if number >= 0:
                places_T[at] = self.engine_list[number].maps[part].find(rows_T[at])
        return places_T

    def blocks_of(self, trajectory: TrajectoryMap) -> NDArray[np.int64]:
        """Return the numbers of the blocks that hold bytes of its rows, ascending."""
        found = [
            np.unique(self.engine_list[number].maps[part].find_each(trajectory.rows[at])["block"])
            for number, at in group_indices(trajectory.engines)
            for part in PARTS
            if number >= 0
        ]
        blocks = np.unique(np.concatenate([np.empty(0, np.int64), *found]))
        return blocks[blocks >= 0]

    def rows(self, part: Part) -> int:
        """Count the rows held of one part, those that every rank has sent."""
        return sum(engine.maps[part].rows for engine in self.engine_list)

    def partial_rows(self) -> int:
        """Count the rows of both parts that some ranks have sent and others have not."""
        maps = (row_map for engine in self.engine_list for row_map in engine.maps.values())
        return sum(row_map.partial_rows for row_map in maps)

    def drop(self, names: Iterable[str], blocks: NDArray[np.int64]) -> list[int]:
        """Forget trajectories and blocks; return the numbers of the entries that told them."""
        numbers: list[int] = blocks.tolist()
        for name in names:
            trajectory = self.trajectories.pop(name)
            self._name_bytes -= text_bytes(name)
            self._trajectory_bytes -= trajectory.nbytes()
            self.states[trajectory.state] -= 1
            self.collected[trajectory.state] += 1
            numbers += trajectory.entries
        if len(blocks):
            self.blocks.drop(blocks)
            for engine in self.engine_list:
                for row_map in engine.maps.values():
                    row_map.drop(blocks)
        return numbers

    def supersede_steps(self) -> None:
        """Forget the steps in which nothing was told that is held."""
        numbers, blocks = self.blocks.held()
        steps = set(np.unique(blocks["step"]).tolist()) | self.digests.steps()
        steps.update(trajectory.step for trajectory in self.trajectories.values())
        told = [entry for trajectory in self.trajectories.values() for entry in trajectory.entries]
        others = np.array([*told, *self.digests.entries()], dtype=np.int64)
        self.superseded += self.steps.keep(steps, np.sort(np.concatenate([numbers, others])))

    def entries(self) -> NDArray[np.int64]:
        """Return the numbers of the entries that it was built of and that may be deleted."""
        told = [entry for trajectory in self.trajectories.values() for entry in trajectory.entries]
        others = np.array([*told, *self.digests.entries(), *self.pins.entries()], dtype=np.int64)
        return np.concatenate([self.blocks.held()[0], others])

    def forget(self, deleted: NDArray[np.int64]) -> bool:
        """Forget what these entries of the store told; return False if a part of it stays told.

        Then this index is not the one that the other entries give.
        """
        gone = set(deleted.tolist())
        names = []
        for name, trajectory in self.trajectories.items():
            lost = gone.intersection(trajectory.entries)
            if lost and len(lost) < len(trajectory.entries):
                return False
            if lost:
                names.append(name)
        numbers = self.blocks.held()[0]
        self.drop(names, numbers[np.isin(numbers, deleted)])
        self.pins.forget(gone)
        return self.digests.forget(gone)

    def begin_anew(self) -> None:
        """Begin what lasts for one process: ages of what has not finished, leases and counts."""
        now = time.monotonic()
        for trajectory in self.trajectories.values():
            trajectory.told_at = now
        self.pins.begin_anew(now)
        self.collected = Counter(dict.fromkeys(TrajectoryState, 0))

    def nbytes(self) -> int:
        """Return the memory that the index takes, about."""
        engines = sum(engine.nbytes() for engine in self.engine_list)
        others = self._trajectory_bytes + self._name_bytes + self.digests.nbytes
        others += self.pins.nbytes + self.steps.nbytes()
        return engines + self.blocks.nbytes() + others

    def _merge(self, told: Trajectory, engine: Engine, seq: int, number: int) -> None:
        trajectory = self.trajectories.get(told.trajectory)
        if trajectory is None:
            trajectory = self.trajectories[told.trajectory] = TrajectoryMap()
            self._name_bytes += text_bytes(told.trajectory)
        else:
            self._trajectory_bytes -= trajectory.nbytes()
            self.states[trajectory.state] -= 1
        fate = trajectory.tell(told, engine.number, seq)
        self.states[trajectory.state] += 1
        if fate is Fate.SUPERSEDED:
            self.superseded.append(number)
            self._trajectory_bytes += trajectory.nbytes()
            return
        self.superseded += trajectory.note_entry(number, engine.number, told.rollout, fate)
        trajectory.step, trajectory.told_at = self.step, time.monotonic()
        self._trajectory_bytes += trajectory.nbytes()

    def _add_engine(self, hello: Hello) -> None:
        if hello.engine_id not in self.engines:
            self._hold_engine(Engine(len(self.engine_list), hello))
        self.engines[hello.engine_id].join(hello)

    def _hold_engine(self, engine: Engine) -> None:
        self.engines[engine.hello.engine_id] = engine
        self.engine_list.append(engine)
        self._name_bytes += registration_bytes(engine.hello)

    def _hold_trajectories(self, trajectories: dict[str, TrajectoryMap]) -> None:
        self.trajectories = trajectories
        self._name_bytes += sum(map(text_bytes, trajectories))
        self._trajectory_bytes += sum(each.nbytes() for each in trajectories.values())
        self.states.update(each.state for each in trajectories.values())

    def _version_number(self, block: RowsHeader) -> int:
        number = self.version_of(block)
        if number < 0:
            number = len(self.weight_versions)
            self._hold_version(block.weight_version, block.weights)
        return number

    def _hold_version(self, label: str, weights: str) -> None:
        self._version_numbers[label, weights] = len(self.weight_versions)
        self.weight_versions.append(label)
        self.weights.append(weights)
        self._name_bytes += text_bytes(label) + text_bytes(weights) + _OBJECT_BYTES
