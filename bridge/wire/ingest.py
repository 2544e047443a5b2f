"""Messages from an inference engine.

Shapes: n = rows of one message, R = bytes of one row, T = tokens of one trajectory message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from math import isfinite
from typing import Any, ClassVar, Self

import msgpack
import numpy as np
from numpy.typing import NDArray

from bridge.errors import CorruptMessage, LayoutError, SchemaMismatch
from bridge.layout import Part, RecordLayout, Shard
from bridge.layout.shape import MAX_LAYERS, check_range
from bridge.layout.shard import MAX_SHARD_FIELDS, MAX_SHARDS, check_shards
from bridge.wire.buffer import MAX_STAMP, BufferHandle, parsed_buffer
from bridge.wire.envelope import Buffer, Envelope
from bridge.wire.fields import MAX_COUNT, Fields, array, vector, wire_bytes
from bridge.wire.message import HeaderOnly, frames_of

MAX_ROWS = 1 << 20
MAX_ROW_BYTES = 16 << 20
MAX_ROW_NUMBER = 1 << 62
MAX_TRAJECTORY_TOKENS = 1 << 22
MAX_MODEL_TEXTS = 64
MAX_LAYOUT_BYTES = 1 << 15
MAX_WEIGHTS_CHARS = 64
MAX_INCARNATION = 1 << 62
MAX_ROLLOUT = 1 << 62
MISSING = -1


@dataclass(frozen=True, slots=True)
class Hello(HeaderOnly):
    """A rank of an engine introduces itself: what the engine's rows look like, once per rank.

    ``kv_scales`` maps an attention layer to its global (K, V) scales; ``model`` is free text pairs
    such as the model path. ``shards`` is what each rank sends of a row, this one being number
    ``shard``; none given is one rank that sends all. All ranks of an engine say the same but for
    ``shard`` and ``incarnation``, so that the first of them says what a complete row needs.

    ``incarnation`` is a random number of the sending process, here as in all messages of an engine:
    the bridge takes a rank's messages from the first incarnation of it alone. Every rank draws its
    own, and one for every bridge.
    """

    KIND: ClassVar[str] = "hello"

    engine_id: str
    layout: RecordLayout
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    shard: int = 0
    incarnation: int = 0

    def __post_init__(self) -> None:
        if not self.shards:
            object.__setattr__(self, "shards", (Shard(self.layout),))

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {
            "engine_id": self.engine_id,
            "layout": layout_body(self.layout),
            "kv_scales": packed_kv_scales(self.kv_scales),
            "model": dict(self.model),
            "shards": [shard.to_dict() for shard in self.shards],
            "shard": self.shard,
            "incarnation": self.incarnation,
        }

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        layout = parsed_layout(fields)
        shards = parsed_shards(fields, layout)
        return cls(
            fields.name("engine_id"),
            layout,
            parsed_kv_scales(fields),
            fields.texts_by_key("model", MAX_MODEL_TEXTS),
            shards,
            fields.integer("shard", 0, len(shards) - 1),
            parsed_incarnation(fields),
        )


@dataclass(frozen=True, slots=True)
class Extent:
    """The lowest and the highest row number of a message; ``is_run``: they count up by one."""

    lowest: int
    highest: int
    is_run: bool

    @classmethod
    def of(cls, rows_N: NDArray[np.int64]) -> Self:
        """Look through row numbers, once if they are a run, as engines number them."""
        first, last = int(rows_N[0]), int(rows_N[-1])
        if last - first == len(rows_N) - 1 and bool((rows_N[1:] > rows_N[:-1]).all()):
            return cls(first, last, True)
        return cls(int(rows_N.min()), int(rows_N.max()), False)


@dataclass(frozen=True)
class RowsHeader:
    """What a Rows message says of its rows: all but the record bytes. This is what is indexed.

    ``shard`` is the number of the sending rank's shard (see `Hello`), here as in all messages.
    ``weights`` is a digest of the weights that the rows were computed with, "" if not known:
    ``weight_version`` is a label, which two engines may give to different weights.
    """

    KIND: ClassVar[str] = "block"

    engine_id: str
    part: Part
    weight_version: str
    row_bytes: int
    rows: NDArray[np.int64]
    shard: int = 0
    weights: str = ""
    incarnation: int = 0

    @cached_property
    def extent(self) -> Extent:
        """Which row numbers these are."""
        return Extent.of(self.rows)

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {
            "engine_id": self.engine_id,
            "part": self.part.value,
            "weight_version": self.weight_version,
            "row_bytes": self.row_bytes,
            "shard": self.shard,
            "weights": self.weights,
            "incarnation": self.incarnation,
        }

    def frames(self) -> list[Buffer]:
        """Return the row numbers."""
        return [wire_bytes(self.rows, "<i8")]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope without record bytes."""
        frames_of(envelope, 1)
        return cls.parse_head(envelope)

    @classmethod
    def parse_head(cls, envelope: Envelope) -> Self:
        """Build from the header and the first frame."""
        fields = Fields(envelope.body)
        rows = vector(envelope.frames[0], "<i8", MAX_ROWS)
        block = cls(
            fields.name("engine_id"),
            parsed_part(fields),
            fields.text("weight_version"),
            fields.integer("row_bytes", 1, MAX_ROW_BYTES),
            rows,
            parsed_shard(fields),
            fields.text("weights", MAX_WEIGHTS_CHARS),
            parsed_incarnation(fields),
        )
        if block.extent.lowest < 0 or block.extent.highest > MAX_ROW_NUMBER:
            raise CorruptMessage("a row number is negative or beyond 2^62; number rows from 0")
        return block


@dataclass(frozen=True, slots=True)
class Rows:
    """Record bytes of rows: block plus ``payload`` uint8 [n, R]."""

    KIND: ClassVar[str] = "rows"

    header: RowsHeader
    payload: NDArray[np.uint8]

    @classmethod
    def of(
        cls,
        engine_id: str,
        part: Part,
        rows: NDArray[np.int64],
        payload: NDArray[np.uint8],
        weight_version: str,
        shard: int = 0,
        weights: str = "",
        incarnation: int = 0,
    ) -> Self:
        """Build a message; rows int64 [n], payload uint8 [n, R]."""
        row_bytes = payload.shape[1]
        block = RowsHeader(
            engine_id, part, weight_version, row_bytes, rows, shard, weights, incarnation
        )
        return cls(block, payload)

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return self.header.body()

    def frames(self) -> list[Buffer]:
        """Return the row numbers and the record bytes."""
        return [*self.header.frames(), wire_bytes(self.payload, np.uint8)]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        _, payload = frames_of(envelope, 2)
        block = RowsHeader.parse_head(envelope)
        return cls(block, array(payload, np.uint8, (len(block.rows), block.row_bytes)))


@dataclass(frozen=True, slots=True)
class RowsInShm:
    """`Rows` whose ``payload`` is in a shared-memory buffer, at its beginning.

    The sender reuses the buffer after the acknowledgement. A reader of a late copy of this message
    then finds another ``stamp`` in the buffer (`bridge.transport.shared_memory`).
    """

    KIND: ClassVar[str] = "lent_rows"

    header: RowsHeader
    buffer: BufferHandle
    stamp: int

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return len(self.header.rows) * self.header.row_bytes

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return self.header.body() | {"place": self.buffer.body(), "stamp": self.stamp}

    def frames(self) -> list[Buffer]:
        """Return the row numbers."""
        return self.header.frames()

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        block, fields = RowsHeader.parse(envelope), Fields(envelope.body)
        buffer = parsed_buffer(fields)
        if buffer is None or len(block.rows) * block.row_bytes > buffer.nbytes:
            raise CorruptMessage("rows in shared memory do not fit their buffer; resend them")
        return cls(block, buffer, fields.integer("stamp", 0, MAX_STAMP))


class TrajectoryState(StrEnum):
    """Where a trajectory stands, as last told by an engine."""

    OPEN = "open"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Which row consumed each token: tokens int32 [T] and rows int64 [T] from position ``start``.

    Row -1 is a token that no row consumed (yet), such as the last sampled one.

    ``rollout`` is the engine's number of the request, counted up. A message of another rollout than
    the one before begins the trajectory anew, unless it ``continues`` it, as a next turn does.
    """

    KIND: ClassVar[str] = "trajectory"

    engine_id: str
    trajectory: str
    start: int
    tokens: NDArray[np.int32]
    rows: NDArray[np.int64]
    state: TrajectoryState
    shard: int = 0
    rollout: int = 0
    continues: bool = False
    incarnation: int = 0

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {
            "engine_id": self.engine_id,
            "trajectory": self.trajectory,
            "start": self.start,
            "state": self.state.value,
            "shard": self.shard,
            "rollout": self.rollout,
            "continues": self.continues,
            "incarnation": self.incarnation,
        }

    def frames(self) -> list[Buffer]:
        """Return tokens and row numbers."""
        return [wire_bytes(self.tokens, "<i4"), wire_bytes(self.rows, "<i8")]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        token_frame, row_frame = frames_of(envelope, 2)
        fields = Fields(envelope.body)
        tokens = vector(token_frame, "<i4", MAX_TRAJECTORY_TOKENS)
        rows = array(row_frame, "<i8", tokens.shape)
        if int(tokens.min()) < 0 or int(rows.min()) < MISSING or int(rows.max()) > MAX_ROW_NUMBER:
            raise CorruptMessage("a trajectory with a negative token id or an invalid row number")
        return cls(
            fields.name("engine_id"),
            fields.name("trajectory"),
            fields.integer("start", 0, MAX_TRAJECTORY_TOKENS - len(tokens)),
            tokens,
            rows,
            parsed_state(fields),
            parsed_shard(fields),
            fields.integer("rollout", 0, MAX_ROLLOUT),
            fields.boolean("continues"),
            parsed_incarnation(fields),
        )


@dataclass(frozen=True, slots=True)
class Dropped(HeaderOnly):
    """How many rows an engine has given up so far because the bridge did not keep up, by part."""

    KIND: ClassVar[str] = "dropped"

    engine_id: str
    forward_rows: int
    kv_rows: int
    shard: int = 0
    incarnation: int = 0

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return asdict(self)

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        return cls(
            fields.name("engine_id"),
            fields.integer("forward_rows", 0, MAX_COUNT),
            fields.integer("kv_rows", 0, MAX_COUNT),
            parsed_shard(fields),
            parsed_incarnation(fields),
        )


@dataclass(frozen=True, slots=True)
class WeightDigests(HeaderOnly):
    """Digests of an engine's quantized weights: tensor name -> hex, for one weight version."""

    KIND: ClassVar[str] = "weight_digests"

    engine_id: str
    weight_version: str
    digests: Mapping[str, str]
    shard: int = 0
    incarnation: int = 0

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {
            "engine_id": self.engine_id,
            "weight_version": self.weight_version,
            "digests": dict(self.digests),
            "shard": self.shard,
            "incarnation": self.incarnation,
        }

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        return cls(
            fields.name("engine_id"),
            fields.text("weight_version"),
            fields.texts_by_key("digests"),
            parsed_shard(fields),
            parsed_incarnation(fields),
        )


def parsed_layout(fields: Fields) -> RecordLayout:
    """Return the layout of a header; raise SchemaMismatch if it is not a valid one."""
    try:
        packed = msgpack.packb(fields.mapping("layout"))
    except ValueError as error:  # it nests deeper than msgpack writes
        raise CorruptMessage(f"the record layout is not valid ({error})") from error
    if len(packed) > MAX_LAYOUT_BYTES:
        raise CorruptMessage(f"a record layout is over the limit of {MAX_LAYOUT_BYTES} bytes")
    return _layout_of(packed)


@lru_cache(maxsize=64)
def layout_body(layout: RecordLayout) -> dict[str, Any]:
    """Return the header field of a layout, which nobody may change."""
    return layout.to_dict()


@lru_cache(maxsize=64)
def _layout_of(packed: bytes) -> RecordLayout:
    """Parse a layout once: every page of a fetch carries the same one."""
    return RecordLayout.from_dict(msgpack.unpackb(packed))


def packed_kv_scales(scales: Mapping[int, tuple[float, float]]) -> list[list[float]]:
    """Return [layer, k, v] triples: msgpack maps here have string keys only."""
    return [[layer, float(k), float(v)] for layer, (k, v) in sorted(scales.items())]


def parsed_kv_scales(fields: Fields) -> dict[int, tuple[float, float]]:
    """Return layer -> (K scale, V scale)."""
    scales: dict[int, tuple[float, float]] = {}
    for item in fields.items("kv_scales"):
        if type(item) is not list or [type(value) for value in item] != [int, float, float]:
            raise CorruptMessage("kv_scales is not a list of [layer, k, v]")
        if not (0 <= item[0] < MAX_LAYERS and isfinite(item[1]) and isfinite(item[2])):
            raise CorruptMessage("kv_scales has a layer out of range or a scale that is not finite")
        scales[item[0]] = (item[1], item[2])
    return scales


def parsed_shard(fields: Fields) -> int:
    """Return the number of the sender's shard."""
    return fields.integer("shard", 0, MAX_SHARDS - 1)


def parsed_incarnation(fields: Fields) -> int:
    """Return the number of the sending process."""
    return fields.integer("incarnation", 0, MAX_INCARNATION)


def parsed_shards(fields: Fields, layout: RecordLayout) -> tuple[Shard, ...]:
    """Return what the ranks of an engine send; raise SchemaMismatch if that makes no whole rows."""
    items = fields.items("shards", MAX_SHARDS)
    try:
        # Before any shard's fields are listed in memory.
        check_range("fields of all shards", len(items) * _field_count(layout), 1, MAX_SHARD_FIELDS)
        shards = tuple(Shard.from_dict(layout, item) for item in items)
        check_shards(layout, shards)
    except (LayoutError, KeyError, TypeError, ValueError) as error:
        raise SchemaMismatch(
            f"the shards of the engine's ranks are not valid ({error}); "
            "run the same release of sglang-trace on both sides"
        ) from error
    return shards


def _field_count(layout: RecordLayout) -> int:
    # One at least: a shard without any is an object too.
    return 1 + sum(len(layout.fields(part)) for part in Part)


def parsed_part(fields: Fields) -> Part:
    """Return the part of a record."""
    try:
        return Part(fields.text("part"))
    except ValueError as error:
        raise CorruptMessage(f"unknown record part: {error}") from error


def parsed_state(fields: Fields) -> TrajectoryState:
    """Return the state of a trajectory."""
    try:
        return TrajectoryState(fields.text("state"))
    except ValueError as error:
        raise CorruptMessage(f"unknown trajectory state: {error}") from error
