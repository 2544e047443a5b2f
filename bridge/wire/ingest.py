"""Messages of an inference engine.

Shape legend: n = rows of one message, R = bytes of one row, T = tokens of one trajectory message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import msgspec
import numpy as np
from msgspec import Meta, field
from numpy.typing import NDArray

from bridge.errors import CorruptMessage
from bridge.layout import Part, RecordLayout, Shard
from bridge.wire.buffer import BufferHandle, Stamp
from bridge.wire.envelope import Buffer, Envelope
from bridge.wire.fields import (
    MAX_ROW_NUMBER,
    MAX_TRAJECTORY_TOKENS,
    Count,
    Incarnation,
    Name,
    Position,
    RowBytes,
    ShardNumber,
    Text,
    TextByKey,
    array,
    wire_bytes,
)
from bridge.wire.message import Message, converted, frames_of

MAX_ROWS = 1 << 20
MISSING = -1


class Hello(Message, frozen=True):
    """A rank of an engine registers, once, with the layout of the engine's rows.

    ``kv_scales`` maps an attention layer to its global (K, V) scales. ``model`` is free text about
    the model, such as its path. ``shards`` are the columns that each rank sends, ``shard`` is the
    number of this rank's; no shards is one rank that sends all. All ranks of an engine send the
    same but for ``shard`` and ``incarnation``, so the first one defines what a complete row needs.

    ``incarnation`` is a random number of the sending process, here as in all messages of an engine.
    The daemon accepts a rank's messages only from its first incarnation. Every rank draws its own
    number, and another one for every bridge.
    """

    KIND: ClassVar[str] = "hello"

    engine_id: Name
    layout: RecordLayout
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    model: Annotated[Mapping[Text, Text], Meta(max_length=64)] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    shard: ShardNumber = 0
    incarnation: Incarnation = 0

    def __post_init__(self) -> None:
        if not self.shards:
            msgspec.structs.force_setattr(self, "shards", (Shard(self.layout),))

    def check(self) -> None:
        """Raise CorruptMessage if the shard is none of the shards."""
        if self.shard >= len(self.shards):
            raise CorruptMessage(f"header field shard is {self.shard} of {len(self.shards)} shards")


@dataclass(frozen=True, slots=True)
class Extent:
    """The lowest and the highest row number of a message; ``is_run``: they count up by one."""

    lowest: int
    highest: int
    is_run: bool

    @classmethod
    def of(cls, rows_N: NDArray[np.int64]) -> Self:
        """Return the extent of row numbers; one pass if they are a run, as engines number them."""
        first, last = int(rows_N[0]), int(rows_N[-1])
        if last - first == len(rows_N) - 1 and bool((rows_N[1:] > rows_N[:-1]).all()):
            return cls(first, last, True)
        return cls(int(rows_N.min()), int(rows_N.max()), False)


class RowsHeader(Message, frozen=True, dict=True):
    """All of a `Rows` message but the record bytes: what the daemon indexes and the journal keeps.

    ``shard`` is the number of the sending rank's shard (see `Hello`), here as in all messages.
    ``weights`` is a digest of the weights that computed the rows, "" if it is not known:
    ``weight_version`` is a label that two engines may give to different weights.
    """

    KIND: ClassVar[str] = "block"  # the name in journals
    ARRAYS: ClassVar[dict[str, str]] = {"rows": "<i8"}
    MAX_ITEMS: ClassVar[int] = MAX_ROWS

    engine_id: Name
    part: Part
    weight_version: Text
    row_bytes: RowBytes
    rows: NDArray[np.int64]
    shard: ShardNumber = 0
    weights: Annotated[str, Meta(max_length=64)] = ""
    incarnation: Incarnation = 0

    @cached_property
    def extent(self) -> Extent:
        """The range of the row numbers."""
        return Extent.of(self.rows)

    def check(self) -> None:
        """Raise CorruptMessage for row numbers that are out of range."""
        if self.extent.lowest < 0 or self.extent.highest > MAX_ROW_NUMBER:
            raise CorruptMessage("a row number is negative or beyond 2^62; number rows from 0")


class Rows(Message, frozen=True):
    """Record bytes of rows: header plus ``payload`` uint8 [n, R]."""

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
        header = RowsHeader(
            engine_id, part, weight_version, row_bytes, rows, shard, weights, incarnation
        )
        return cls(header, payload)

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return self.header.body()

    def frames(self) -> list[Buffer]:
        """Return the row numbers and the record bytes."""
        return [*self.header.frames(), wire_bytes(self.payload, np.uint8)]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        numbers, payload = frames_of(envelope, 2)
        header = RowsHeader.build(envelope.body, RowsHeader.arrays((numbers,)))
        return cls(header, array(payload, np.uint8, (len(header.rows), header.row_bytes)))


class _InShm(msgspec.Struct, frozen=True):
    buffer: BufferHandle
    stamp: Stamp


class RowsInShm(Message, frozen=True):
    """`Rows` whose ``payload`` is in a shared-memory buffer, at its beginning.

    The sender reuses the buffer after the acknowledgement. A reader of a late copy of this message
    then finds another ``stamp`` in the buffer (`bridge.transport.shared_memory`).
    """

    KIND: ClassVar[str] = "rows_in_shm"

    header: RowsHeader
    buffer: BufferHandle
    stamp: Stamp

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return len(self.header.rows) * self.header.row_bytes

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        in_shm: dict[str, Any] = msgspec.to_builtins(_InShm(self.buffer, self.stamp))
        return self.header.body() | in_shm

    def frames(self) -> list[Buffer]:
        """Return the row numbers."""
        return self.header.frames()

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        header = RowsHeader.parse(envelope)
        in_shm = converted(envelope.body, _InShm, cls.KIND)
        if len(header.rows) * header.row_bytes > in_shm.buffer.nbytes:
            raise CorruptMessage("rows in shared memory do not fit their buffer; resend them")
        return cls(header, in_shm.buffer, in_shm.stamp)


class TrajectoryState(StrEnum):
    """State of a trajectory, as last reported by an engine."""

    OPEN = "open"
    FINISHED = "finished"
    ABORTED = "aborted"


class Trajectory(Message, frozen=True):
    """The row of each token: tokens int32 [T] and rows int64 [T] from position ``start``.

    Row -1 is a token that no row consumed (yet), such as the last sampled one.

    ``rollout`` is the engine's number of the request, counted up. A message of another rollout than
    the one before begins the trajectory anew, unless it ``continues`` it, as a next turn does.
    """

    KIND: ClassVar[str] = "trajectory"
    ARRAYS: ClassVar[dict[str, str]] = {"tokens": "<i4", "rows": "<i8"}

    engine_id: Name
    trajectory: Name
    start: Position
    tokens: NDArray[np.int32]
    rows: NDArray[np.int64]
    state: TrajectoryState
    shard: ShardNumber = 0
    rollout: Count = 0
    continues: bool = False
    incarnation: Incarnation = 0

    def check(self) -> None:
        """Raise CorruptMessage for tokens, rows or positions that are out of range."""
        if int(self.tokens.min()) < 0:
            raise CorruptMessage("a trajectory with a negative token id")
        if int(self.rows.min()) < MISSING or int(self.rows.max()) > MAX_ROW_NUMBER:
            raise CorruptMessage("a trajectory with an invalid row number")
        if self.start + len(self.tokens) > MAX_TRAJECTORY_TOKENS:
            raise CorruptMessage("header field start lies beyond the longest trajectory")


class Dropped(Message, frozen=True):
    """Counts of the rows that an engine has dropped so far, by part."""

    KIND: ClassVar[str] = "dropped"

    engine_id: Name
    forward_rows: Count
    kv_rows: Count
    shard: ShardNumber = 0
    incarnation: Incarnation = 0


class WeightDigests(Message, frozen=True):
    """Digests of an engine's quantized weights: tensor name -> hex, for one weight version."""

    KIND: ClassVar[str] = "weight_digests"

    engine_id: Name
    weight_version: Text
    digests: TextByKey
    shard: ShardNumber = 0
    incarnation: Incarnation = 0
