"""The daemon's index without record bytes: the result of applying journal records in order."""

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
from bridge.index.tables.row_map import absent_locations
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

IngestedRecord = Hello | RowsHeader | Trajectory | WeightDigests | Dropped | Step
JournalRecord = IngestedRecord | Pin
PARTS = tuple(Part)
_OBJECT_BYTES = 200


class Catalog:
    """Engines, trajectories, blocks of rows, weight versions and digests.

    ``states`` counts the stored trajectories by state, ``collected`` the removed ones.
    ``weight_versions`` and ``weights`` have the label and digest of each weight version number.
    ``versions_used`` has these numbers in the order in which engines last reported rows of them.
    ``superseded`` has store entries that the index no longer needs; whoever deletes them clears it.
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
        """Return what a checkpoint keeps: no derived values and none that `begin_anew` sets.

        The number of an engine or of a weight version is its index in the list.
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
        """Return the catalog of a snapshot; the caller calls `begin_anew` next."""
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
        """The RL step of the records that arrive now."""
        return self.steps.current

    def check(self, record: JournalRecord) -> None:
        """Raise UnknownEngine, EngineIdTaken or SchemaMismatch if it cannot be applied."""
        if isinstance(record, Step | Pin):
            return
        engine = self.engines.get(record.engine_id)
        if isinstance(record, Hello):
            if engine is not None:
                engine.check_hello(record)
            return
        if engine is None:
            raise unknown_engine(record)
        engine.check_sender(record)
        if isinstance(record, RowsHeader):
            engine.check_block(record)

    def seen(self, record: IngestedRecord, seq: int) -> bool:
        """Whether the catalog has applied a rank's message with this sequence number.

        Also true for a record without news: a known rank, a count that is not higher, a step that
        has begun.
        """
        if isinstance(record, Step):
            return self.steps.has_begun(record.step)
        engine = self.engines.get(record.engine_id)
        if engine is None:
            return False
        match record:
            case Hello():
                return record.shard in engine.incarnations
            case Dropped():
                return engine.has_recorded_dropped(record)
        return seq in engine.accepted[record.shard]

    def apply(self, record: JournalRecord, seq: int, number: int) -> None:
        """Apply a checked record, which is store entry ``number``."""
        if isinstance(record, Step):
            self.steps.begin(record.step, number)
            return
        if isinstance(record, Pin):
            for name in record.trajectories:
                self.superseded += self.pins.put(name, record.lease_s, number, time.monotonic())
            return
        if isinstance(record, Hello):
            self._add_engine(record)
        engine = self.engines[record.engine_id]
        if isinstance(record, Dropped):
            self.superseded += engine.record_dropped(record, number)
            return
        engine.accepted[record.shard].add(seq)
        match record:
            case RowsHeader():
                version = self._version_number(record)
                self.versions_used.use(version)
                part = PARTS.index(record.part)
                self.blocks.put(number, engine.number, part, version, self.step, record.row_bytes)
                engine.put_block(record, number)
            case Trajectory():
                self._merge(record, engine, seq, number)
            case WeightDigests():
                self.digests.put(record, number, self.step)

    def version_of(self, block: RowsHeader) -> int:
        """Return the number of a block's weights, by label and digest; -1 if they are new."""
        return self._version_numbers.get((block.weight_version, block.weights), -1)

    def growth(self, record: IngestedRecord) -> int:
        """Return the approximate bytes that applying a checked record adds to the index.

        A row number or position far from the known ones takes much more than its message has.
        """
        match record:
            case Hello():
                return 0 if record.engine_id in self.engines else registration_bytes(record)
            case RowsHeader():
                rows = self.engines[record.engine_id].maps[record.part]
                return rows.growth(record.rows, is_run=record.extent.is_run)
            case Trajectory():
                known = self.trajectories.get(record.trajectory) or TrajectoryMap()
                return known.growth(record.start + len(record.tokens))
            case WeightDigests():
                return digest_bytes(record.digests)
        return 0

    def locations(self, part: Part, trajectory: TrajectoryMap, page: slice) -> NDArray[np.void]:
        """Return LOCATION [T] of the complete rows of the positions in ``page``.

        For a row that several ranks share it is the location of the first rank's bytes.
        """
        engines_T, rows_T = trajectory.engines[page], trajectory.rows[page]
        locations_T = absent_locations(len(rows_T))
        for number, at in group_indices(engines_T):
            if number >= 0:
                locations_T[at] = self.engine_list[number].maps[part].find(rows_T[at])
        return locations_T

    def blocks_of(self, trajectory: TrajectoryMap) -> NDArray[np.int64]:
        """Return the numbers of the blocks with bytes of the trajectory's rows, ascending."""
        found = [
            np.unique(self.engine_list[number].maps[part].find_each(trajectory.rows[at])["block"])
            for number, at in group_indices(trajectory.engines)
            for part in PARTS
            if number >= 0
        ]
        blocks = np.unique(np.concatenate([np.empty(0, np.int64), *found]))
        return blocks[blocks >= 0]

    def rows(self, part: Part) -> int:
        """Count the complete rows of one part: every rank has sent its bytes."""
        return sum(engine.maps[part].rows for engine in self.engine_list)

    def partial_rows(self) -> int:
        """Count the rows of both parts that some ranks have sent and others have not sent."""
        maps = (row_map for engine in self.engine_list for row_map in engine.maps.values())
        return sum(row_map.partial_rows for row_map in maps)

    def delete(self, names: Iterable[str], blocks: NDArray[np.int64]) -> list[int]:
        """Delete trajectories and blocks; return the numbers of their store entries."""
        numbers: list[int] = blocks.tolist()
        for name in names:
            trajectory = self.trajectories.pop(name)
            self._name_bytes -= text_bytes(name)
            self._trajectory_bytes -= trajectory.nbytes()
            self.states[trajectory.state] -= 1
            self.collected[trajectory.state] += 1
            numbers += trajectory.entries
        if len(blocks):
            self.blocks.delete(blocks)
            for engine in self.engine_list:
                for row_map in engine.maps.values():
                    row_map.delete(blocks)
        return numbers

    def supersede_steps(self) -> None:
        """Forget the steps of which the index has no block, digest or trajectory."""
        numbers, blocks = self.blocks.held()
        steps = set(np.unique(blocks["step"]).tolist()) | self.digests.steps()
        steps.update(trajectory.step for trajectory in self.trajectories.values())
        entries = [
            entry for trajectory in self.trajectories.values() for entry in trajectory.entries
        ]
        others = np.array([*entries, *self.digests.entries()], dtype=np.int64)
        self.superseded += self.steps.keep(steps, np.sort(np.concatenate([numbers, others])))

    def entries(self) -> NDArray[np.int64]:
        """Return the numbers of the deletable entries from which the index was built."""
        entries = [
            entry for trajectory in self.trajectories.values() for entry in trajectory.entries
        ]
        others = np.array([*entries, *self.digests.entries(), *self.pins.entries()], dtype=np.int64)
        return np.concatenate([self.blocks.held()[0], others])

    def forget(self, deleted: NDArray[np.int64]) -> bool:
        """Forget the content of deleted store entries; return False if that is not possible.

        It is not possible if only some entries of a trajectory or digest are deleted. The index
        then differs from the one that a replay of the remaining entries gives.
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
        self.delete(names, numbers[np.isin(numbers, deleted)])
        self.pins.forget(gone)
        return self.digests.forget(gone)

    def begin_anew(self) -> None:
        """Reset per-process state: ages of open trajectories, leases of pins, removal counts."""
        now = time.monotonic()
        for trajectory in self.trajectories.values():
            trajectory.updated_at = now
        self.pins.begin_anew(now)
        self.collected = Counter(dict.fromkeys(TrajectoryState, 0))

    def nbytes(self) -> int:
        """Return the approximate bytes of the index."""
        engines = sum(engine.nbytes() for engine in self.engine_list)
        others = self._trajectory_bytes + self._name_bytes + self.digests.nbytes
        others += self.pins.nbytes + self.steps.nbytes()
        return engines + self.blocks.nbytes() + others

    def _merge(self, record: Trajectory, engine: Engine, seq: int, number: int) -> None:
        trajectory = self.trajectories.get(record.trajectory)
        if trajectory is None:
            trajectory = self.trajectories[record.trajectory] = TrajectoryMap()
            self._name_bytes += text_bytes(record.trajectory)
        else:
            self._trajectory_bytes -= trajectory.nbytes()
            self.states[trajectory.state] -= 1
        fate = trajectory.apply(record, engine.number, seq)
        self.states[trajectory.state] += 1
        if fate is Fate.SUPERSEDED:
            self.superseded.append(number)
            self._trajectory_bytes += trajectory.nbytes()
            return
        self.superseded += trajectory.note_entry(number, engine.number, record.rollout, fate)
        trajectory.step, trajectory.updated_at = self.step, time.monotonic()
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
