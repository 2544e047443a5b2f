"""One engine: its row layout, the ranks that send rows, row locations and accepted messages.

An engine is one replica of the model, or one data-parallel rank of it. (engine, row number) names a
row. Row numbers count the tokens of the engine in the order of its forward passes. Ranks that
compute the same passes in lockstep use the same row numbers, so the daemon joins their parts of a
row. The shard number identifies a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgpack
import msgspec
import numpy as np
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from bridge.errors import EngineIdTaken, SchemaMismatch, UnknownEngine
from bridge.index.tables.row_map import RowMap
from bridge.index.tables.saved import Saved, Snapshot, UnusableCheckpoint, table
from bridge.index.tables.sequence_set import SequenceSet
from bridge.index.tables.sizes import text_bytes
from bridge.layout import Part, Shard
from bridge.wire import Dropped, Hello, RowsHeader, Trajectory, WeightDigests
from bridge.wire.envelope import NO_SEQ, Envelope
from bridge.wire.fields import Incarnation, Name, ShardNumber
from bridge.wire.message import converted

Sent = Hello | RowsHeader | Trajectory | Dropped | WeightDigests

_OBJECT_BYTES = 200
_OWN = dict.fromkeys(("engine_id", "shard", "incarnation"))  # all else is equal on many engines
_ENGINE_BYTES = 4 << 10  # two row maps, sequence numbers and the Hello


@dataclass(slots=True)
class Engine:
    """An engine by its number in the index.

    ``incarnations`` has the process number of each rank, from its first Hello. Another process with
    the same engine id also counts rows and messages from 0. The daemon cannot distinguish its rows
    from the stored ones, so it refuses all its messages.

    ``accepted`` has each rank's sequence numbers, ``dropped`` the number of rows that each rank
    dropped, ``dropped_entries`` the store entry with that count.
    """

    number: int
    hello: Hello
    maps: dict[Part, RowMap] = field(init=False)
    accepted: list[SequenceSet] = field(init=False)
    incarnations: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    dropped_entries: dict[int, int] = field(default_factory=dict)
    _senders: dict[Part, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        shards = list(enumerate(self.hello.shards))
        self._senders = {part: [n for n, s in shards if s.sends(part)] for part in Part}
        self.maps = {part: RowMap(max(1, len(self._senders[part]))) for part in Part}
        self.accepted = [SequenceSet() for _ in shards]

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: the Hello as on the wire, and the state of each rank.

        Tables by rank have rows of (rank number, value).
        """
        return {
            "hello": self.hello.body(),
            "maps": {part.value: row_map.snapshot() for part, row_map in self.maps.items()},
            "accepted": [seqs.snapshot() for seqs in self.accepted],
            "incarnations": table(self.incarnations.items(), 2),
            "dropped": table(self.dropped.items(), 2),
            "dropped_entries": table(self.dropped_entries.items(), 2),
        }

    @classmethod
    def restore(cls, number: int, saved: Saved, hellos: dict[bytes, Hello]) -> Self:
        """Return the engine of a snapshot; ``hellos`` has the Hello of other engines."""
        made = cls(number, _hello(saved.part("hello").values, hellos))
        for part, senders in made._senders.items():
            of_part = saved.part("maps").part(part.value)
            made.maps[part] = RowMap.restore(of_part, max(1, len(senders)))
        made.accepted = [SequenceSet.restore(seqs) for seqs in saved.parts("accepted")]
        if len(made.accepted) != len(made.hello.shards):
            raise UnusableCheckpoint("accepted has another number of ranks than the Hello")
        made.incarnations = saved.pairs("incarnations")
        made.dropped = saved.pairs("dropped")
        made.dropped_entries = saved.pairs("dropped_entries")
        return made

    @property
    def is_shared(self) -> bool:
        """Whether several ranks send its rows, or one rank sends them by expert slot."""
        return len(self.hello.shards) > 1 or self.hello.shards[0].by_slot

    @property
    def dropped_rows(self) -> int:
        """Rows that its ranks dropped; a row counts once per rank that dropped it."""
        return sum(self.dropped.values())

    def senders(self, part: Part) -> Sequence[Shard]:
        """Return the shards that have bytes of this part, in the order of the row map's senders."""
        return [self.hello.shards[number] for number in self._senders[part]]

    def has_recorded_dropped(self, record: Dropped) -> bool:
        """Whether the count of a rank is not higher than the recorded one; counts only grow."""
        return record.forward_rows + record.kv_rows <= self.dropped.get(record.shard, 0)

    def record_dropped(self, record: Dropped, number: int) -> list[int]:
        """Record a count from entry ``number``; return the entry of the previous count."""
        before = self.dropped_entries.get(record.shard)
        count = record.forward_rows + record.kv_rows
        self.dropped[record.shard] = max(count, self.dropped.get(record.shard, 0))
        self.dropped_entries[record.shard] = number
        return [] if before is None else [before]

    def put_block(self, block: RowsHeader, number: int) -> None:
        """Record that store entry ``number`` has the rows of a checked block."""
        self.maps[block.part].put(
            block.rows, number, self._sender(block), is_run=block.extent.is_run
        )

    def highest_row(self, block: RowsHeader) -> int:
        """Return the highest row number that the block's rank has sent of this part."""
        return self.maps[block.part].highest[self._sender(block)]

    def held_rows(self, block: RowsHeader) -> NDArray[np.void]:
        """Return LOCATION [N] of the block's rows; rows that its rank has not sent are absent."""
        return self.maps[block.part].find_each(block.rows)[:, self._sender(block)]

    def check_hello(self, hello: Hello) -> None:
        """Raise EngineIdTaken or SchemaMismatch unless it is one of this engine's ranks."""
        self._check_incarnation(hello)
        theirs, ours = (replace(each, shard=0, incarnation=0) for each in (hello, self.hello))
        if theirs != ours:
            raise SchemaMismatch(
                f"engine {hello.engine_id} has registered with another record layout; "
                "use a new engine id for every engine process, and the same layout, shards, scales "
                "and model on all ranks of one engine"
            )

    def join(self, hello: Hello) -> None:
        """Record the process of a rank; the caller has checked the Hello."""
        self.incarnations[hello.shard] = hello.incarnation

    def check_sender(self, message: Sent) -> None:
        """Raise an error unless the sender is the registered process of a rank.

        Raises:
            UnknownEngine: the rank has not registered.
            EngineIdTaken: another process has registered as this rank.
            SchemaMismatch: the engine has no such rank.
        """
        shards = len(self.hello.shards)
        if message.shard >= shards:
            raise SchemaMismatch(
                f"engine {message.engine_id} has {shards} shards and a message is from shard "
                f"{message.shard}; number the ranks as in the Hello"
            )
        if message.shard not in self.incarnations:
            raise unknown_engine(message)
        self._check_incarnation(message)

    def _check_incarnation(self, message: Sent) -> None:
        first = self.incarnations.get(message.shard, message.incarnation)
        if first != message.incarnation:
            raise EngineIdTaken(
                f"engine id {message.engine_id} belongs to another process, whose records this "
                "bridge stores, so it refuses this process; use a new engine id for every "
                "engine process"
            )

    def check_block(self, block: RowsHeader) -> None:
        """Raise SchemaMismatch if the block's rows are not rows of its rank's shard."""
        shard = self.hello.shards[block.shard]
        if not shard.accepts(block.part, block.row_bytes):
            raise SchemaMismatch(
                f"engine {self.hello.engine_id} sent {block.part.value} rows of {block.row_bytes} "
                f"bytes and its Hello says {shard.layout.row_bytes(block.part)} for shard "
                f"{block.shard}; send rows in the layout of the Hello"
            )

    def _sender(self, block: RowsHeader) -> int:
        return self._senders[block.part].index(block.shard)

    def writes_like(self, other: Engine) -> bool:
        """Whether the bytes of a joined row mean the same as in the other engine's rows."""
        mine, theirs = self.hello, other.hello
        return mine.layout == theirs.layout and mine.kv_scales == theirs.kv_scales

    def nbytes(self) -> int:
        """Return the approximate bytes of its row maps and sequence numbers."""
        accepted = sum(seqs.nbytes() for seqs in self.accepted)
        return accepted + sum(row_map.nbytes() for row_map in self.maps.values())


def _hello(body: dict[str, Any], known: dict[bytes, Hello]) -> Hello:
    """Parse a Hello; reuse the parsed fields of a known one that differs only in `_OWN`."""
    packed: bytes = msgpack.packb({**body, **_OWN})
    if packed not in known:
        known[packed] = Hello.parse(Envelope(Hello.KIND, NO_SEQ, body, ()))
    hello = replace(known[packed], **asdict(converted(body, _Own, Hello.KIND)))
    hello.check()
    return hello


class _Own(msgspec.Struct, frozen=True):
    """What a registration has of its own, whatever other engines look like."""

    engine_id: Name
    shard: ShardNumber
    incarnation: Incarnation


def unknown_engine(message: Sent) -> UnknownEngine:
    """Return the error for a message that arrives before its sender's Hello."""
    return UnknownEngine(
        f"engine {message.engine_id} sent records before its Hello; send the Hello first"
    )


def registration_bytes(hello: Hello) -> int:
    """Return the approximate bytes that the registration of an engine takes."""
    layouts = {hello.layout, *(shard.layout for shard in hello.shards)}
    fields = sum(len(layout.fields(part)) for layout in layouts for part in Part)
    texts = sum(text_bytes(text) for pair in hello.model.items() for text in pair)
    texts += text_bytes(hello.engine_id)
    return _ENGINE_BYTES + _OBJECT_BYTES * (fields + len(hello.kv_scales)) + texts
