"""Everything the daemon knows but the record bytes, built by applying messages one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bridge.errors import SchemaMismatch, TraceError
from bridge.index.grouping import groups
from bridge.index.row_map import RowMap, absent_places
from bridge.index.sequence_set import SequenceSet
from bridge.index.trajectory_map import TrajectoryMap
from bridge.layout import Part
from bridge.wire import Block, Hello, Trajectory, WeightDigests

Told = Hello | Block | Trajectory | WeightDigests


class UnknownEngine(TraceError):
    """An engine sent records without a hello that this daemon remembers."""


@dataclass(slots=True)
class Engine:
    """One engine process: its index, what its rows look like, where they are, what was accepted."""

    number: int
    hello: Hello
    maps: dict[Part, RowMap] = field(default_factory=lambda: {part: RowMap() for part in Part})
    accepted: SequenceSet = field(default_factory=SequenceSet)

    def writes_like(self, other: Engine) -> bool:
        """Whether the bytes of a row mean the same as in the other engine's rows."""
        mine, theirs = self.hello, other.hello
        return mine.layout == theirs.layout and mine.kv_scales == theirs.kv_scales


class Catalog:
    """Engines, trajectories, weight versions and digests."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.engine_list: list[Engine] = []
        self.trajectories: dict[str, TrajectoryMap] = {}
        self.weight_versions: list[str] = []
        self.digests: dict[str, dict[str, dict[str, str]]] = {}
        self._version_numbers: dict[str, int] = {}

    def check(self, told: Told) -> None:
        """Raise UnknownEngine or SchemaMismatch if the message cannot be applied."""
        engine = self.engines.get(told.engine_id)
        if isinstance(told, Hello):
            if engine is not None and engine.hello != told:
                raise SchemaMismatch(
                    f"engine {told.engine_id} said hello before with another record layout; "
                    "use a new engine id for every engine process"
                )
        elif engine is None:
            raise UnknownEngine(
                f"engine {told.engine_id} sent records before its hello; send the hello first"
            )
        elif isinstance(told, Block):
            expected = engine.hello.layout.row_bytes(told.part)
            if told.row_bytes != expected:
                raise SchemaMismatch(
                    f"engine {told.engine_id} sent {told.part.value} rows of {told.row_bytes} "
                    f"bytes and its hello says {expected}; send rows in the layout of the hello"
                )

    def seen(self, told: Told, seq: int) -> bool:
        """Whether (engine, seq) has been applied before."""
        engine = self.engines.get(told.engine_id)
        return engine is not None and seq in engine.accepted

    def apply(self, told: Told, seq: int, block: int) -> None:
        """Apply a checked message that the store holds as entry ``block``."""
        if isinstance(told, Hello):
            self._add_engine(told)
        engine = self.engines[told.engine_id]
        engine.accepted.add(seq)
        if isinstance(told, Block):
            version = self._version_number(told.weight_version)
            engine.maps[told.part].put(told.rows, block, told.row_crcs, version)
        elif isinstance(told, Trajectory):
            trajectory = self.trajectories.setdefault(told.trajectory, TrajectoryMap())
            trajectory.merge(told.start, told.tokens, told.rows, engine.number, told.state)
        elif isinstance(told, WeightDigests):
            by_engine = self.digests.setdefault(told.weight_version, {})
            earlier = by_engine.pop(told.engine_id, {})  # the last to report stands last
            by_engine[told.engine_id] = {**earlier, **told.digests}

    def places(self, part: Part, trajectory: TrajectoryMap, page: slice) -> NDArray[np.void]:
        """Return where the rows of the positions in ``page`` are, as PLACE [T]."""
        engines_T, rows_T = trajectory.engines[page], trajectory.rows[page]
        places_T = absent_places(len(rows_T))
        for number, at in groups(engines_T):
            if number >= 0:
                places_T[at] = self.engine_list[number].maps[part].find(rows_T[at])
        return places_T

    def rows(self, part: Part) -> int:
        """Count the rows held of one part."""
        return sum(engine.maps[part].rows for engine in self.engine_list)

    def _add_engine(self, hello: Hello) -> None:
        if hello.engine_id not in self.engines:
            engine = Engine(len(self.engine_list), hello)
            self.engines[hello.engine_id] = engine
            self.engine_list.append(engine)

    def _version_number(self, version: str) -> int:
        number = self._version_numbers.get(version)
        if number is None:
            number = self._version_numbers[version] = len(self.weight_versions)
            self.weight_versions.append(version)
        return number
