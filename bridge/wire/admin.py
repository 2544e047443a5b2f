"""Questions about what the daemon holds: trajectories, weight digests, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar, Self

from bridge.errors import CorruptMessage
from bridge.wire.envelope import Envelope
from bridge.wire.fields import MAX_COUNT, Fields
from bridge.wire.ingest import parsed_state
from bridge.wire.message import HeaderOnly, Signal, frames_of


@dataclass(frozen=True, slots=True)
class List(HeaderOnly):
    """Ask for trajectory summaries, from the ``after``-th on, at most one page."""

    KIND: ClassVar[str] = "list"

    after: int = 0
    prefix: str = ""

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"after": self.after, "prefix": self.prefix}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        return cls(fields.integer("after", 0, MAX_COUNT), fields.text("prefix"))


@dataclass(frozen=True, slots=True)
class TrajectorySummary:
    """What is held of a trajectory.

    ``rows`` and ``kv_rows`` count positions whose forward and K/V row is held; ``missing_forward``
    and ``missing_kv`` positions that should have such a row and do not (the last token needs none).
    """

    trajectory: str
    state: str
    tokens: int
    rows: int
    kv_rows: int
    missing_forward: int
    missing_kv: int
    weight_versions: tuple[str, ...]
    nbytes: int

    @classmethod
    def parse(cls, body: object) -> Self:
        """Build from a map of a list reply."""
        if not isinstance(body, dict):
            raise CorruptMessage("a trajectory summary is not a map")
        fields = Fields(body)
        return cls(
            trajectory=fields.name("trajectory"),
            state=parsed_state(fields).value,
            tokens=fields.integer("tokens", 0, MAX_COUNT),
            rows=fields.integer("rows", 0, MAX_COUNT),
            kv_rows=fields.integer("kv_rows", 0, MAX_COUNT),
            missing_forward=fields.integer("missing_forward", 0, MAX_COUNT),
            missing_kv=fields.integer("missing_kv", 0, MAX_COUNT),
            weight_versions=fields.texts("weight_versions"),
            nbytes=fields.integer("nbytes", 0, MAX_COUNT),
        )


@dataclass(frozen=True, slots=True)
class ListReply(HeaderOnly):
    """One page of summaries; ``next`` is the ``after`` of the next page, None at the end."""

    KIND: ClassVar[str] = "list_reply"

    summaries: tuple[TrajectorySummary, ...]
    next: int | None

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"summaries": [asdict(item) for item in self.summaries], "next": self.next}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        summaries = tuple(TrajectorySummary.parse(item) for item in fields.items("summaries"))
        return cls(summaries, fields.optional_integer("next", 0, MAX_COUNT))


@dataclass(frozen=True, slots=True)
class Digests(HeaderOnly):
    """Ask for the weight digests of a version."""

    KIND: ClassVar[str] = "digests"

    weight_version: str

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"weight_version": self.weight_version}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        return cls(Fields(envelope.body).text("weight_version"))


@dataclass(frozen=True, slots=True)
class DigestsReply(HeaderOnly):
    """Digests by engine, the engine that reported last standing last."""

    KIND: ClassVar[str] = "digests_reply"

    by_engine: Mapping[str, Mapping[str, str]]

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"by_engine": {engine: dict(found) for engine, found in self.by_engine.items()}}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        by_engine = Fields(Fields(envelope.body).mapping("by_engine"))
        return cls({engine: by_engine.texts_by_key(engine) for engine in by_engine.body})


@dataclass(frozen=True, slots=True)
class Stats(Signal):
    """Ask for the daemon's counters."""

    KIND: ClassVar[str] = "stats"


@dataclass(frozen=True, slots=True)
class StatsReply(HeaderOnly):
    """The daemon's counters; ``store`` names its tiers, memory before disk.

    ``memory_bytes`` counts record bytes in memory and ``index_bytes`` what finds them, together
    under ``memory_limit``; ``disk_bytes`` is under ``disk_limit`` (0: no such tier);
    ``pool_bytes`` lie in a Mooncake pool. ``full`` is 1 while the store refuses records
    for lack of room and ``failing`` is 1 while its disk cannot be written to.
    ``corrupt_rows`` counts rows that failed their checksum when read (they are then missing),
    ``damaged_entries`` journal entries that were not readable at start-up, ``refused`` messages
    answered with an error, ``refused_peers`` connections that had no key that is known,
    ``commits`` writes to the store, ``dropped_rows`` rows that engines gave up, ``collected``
    trajectories that were removed, ``partial_rows`` rows of both parts that some of an engine's
    ranks have sent and others have not: they are missing until then, and not among the others.
    """

    KIND: ClassVar[str] = "stats_reply"

    store: str
    memory_bytes: int
    index_bytes: int
    memory_limit: int
    disk_bytes: int
    disk_limit: int
    pool_bytes: int
    full: int
    step: int
    engines: int
    trajectories: int
    forward_rows: int
    kv_rows: int
    partial_rows: int
    dropped_rows: int
    collected: int
    messages: int
    commits: int
    duplicates: int
    refused: int
    refused_peers: int
    corrupt_rows: int
    damaged_entries: int
    failing: int

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return asdict(self)

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        counters = [item.name for item in dataclass_fields(cls) if item.name != "store"]
        return cls(fields.name("store"), *(fields.integer(name, 0, MAX_COUNT) for name in counters))
