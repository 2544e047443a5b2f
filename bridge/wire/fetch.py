"""Fetch requests and pages: first the page's head, then its rows in chunks.

A chunk is small enough to stay in the CPU caches between the daemon's memory, the socket and the
reader.

Shape legend: T = positions of a page, P = positions of a chunk, V = those of them that have a row,
W = bytes of a row of the part in the page's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from bridge.errors import CorruptMessage
from bridge.layout import Part, RecordLayout, TensorSlice
from bridge.layout.shape import MAX_LAYERS
from bridge.layout.tensor_slice import ALL_VALUES
from bridge.wire.buffer import BufferHandle, Offset, Stamp
from bridge.wire.envelope import Buffer, Envelope
from bridge.wire.fields import Count, Layer, Name, Names, Position, RowBytes, array, wire_bytes
from bridge.wire.ingest import TrajectoryState
from bridge.wire.message import Message, frames_of

_Layers = Annotated[tuple[Layer, ...], Meta(max_length=MAX_LAYERS)]
_SiteName = Annotated[str, Meta(max_length=64)]
_Sites = Annotated[tuple[_SiteName, ...], Meta(max_length=64)]


class Fetch(Message, frozen=True):
    """Request positions [start, stop) of a trajectory; None means all layers, sites, positions.

    ``tensor_slice`` are the values of fc2, K and V to send. With a ``buffer`` the page is no larger
    than fits there, and its rows are `ShmPageRows` if the daemon can write to it.
    """

    KIND: ClassVar[str] = "fetch"

    trajectory: Name
    start: Position = 0
    stop: Position | None = None
    layers: _Layers | None = None
    sites: _Sites | None = None
    tensor_slice: TensorSlice = ALL_VALUES
    buffer: BufferHandle | None = None


class FetchReply(Message, frozen=True):
    """The head of a page: T positions from ``start``; the trajectory's ``length`` and ``revision``.

    Rows of each part of its layout follow in `PageRows`, under the same sequence number.

    ``revision`` changes whenever the trajectory does, so a reader of several pages can tell.
    ``versions`` indexes ``weight_versions`` and ``weights``, the label and the digest of the rows'
    weights, -1 where no row is recorded; ``engines`` indexes ``engine_ids`` likewise.
    A token id of -1 is a position that no engine has reported. ``rows`` are the engine's numbers of
    the rows, -1 where it reported none, whether the bridge holds them or not.
    """

    KIND: ClassVar[str] = "fetch_reply"
    ARRAYS: ClassVar[dict[str, str]] = {
        "tokens": "<i4",
        "versions": "<i4",
        "engines": "<i4",
        "rows": "<i8",
    }
    MIN_ITEMS: ClassVar[int] = 0

    trajectory: Name
    state: TrajectoryState
    revision: Count
    length: Position
    start: Position
    layout: RecordLayout
    kv_scales: Mapping[int, tuple[float, float]]
    weight_versions: Names
    engine_ids: Names
    tokens: NDArray[np.int32]
    versions: NDArray[np.int32]
    engines: NDArray[np.int32]
    rows: NDArray[np.int64]
    weights: Names = ()

    def __post_init__(self) -> None:
        if not self.weights:
            msgspec.structs.force_setattr(self, "weights", ("",) * len(self.weight_versions))

    def check(self) -> None:
        """Raise CorruptMessage unless every weight version has a digest."""
        if len(self.weights) != len(self.weight_versions):
            raise CorruptMessage("a page has not one digest for each of its weight versions")


class _Rows(Message, frozen=True):
    """Header fields and validity of `PageRows`."""

    KIND: ClassVar[str] = "page_rows"
    ARRAYS: ClassVar[dict[str, str]] = {"valid": "u1"}

    part: Part
    begin: Position
    valid: NDArray[np.bool_]
    row_bytes: RowBytes

    @classmethod
    def arrays(cls, frames: tuple[memoryview, ...]) -> dict[str, NDArray[Any]]:
        """View the frame as bool [P]."""
        return {"valid": super().arrays(frames)["valid"].astype(np.bool_)}

    @property
    def count(self) -> int:
        """The number of rows."""
        return int(np.count_nonzero(self.valid))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.count * self.row_bytes


class PageRows(Message, frozen=True):
    """Rows of one part for P positions of a page, from its position ``begin`` on.

    ``valid`` is bool [P]; ``rows`` is uint8 [V, W], those of the valid positions one after the
    other: a missing row takes no bytes.
    """

    KIND: ClassVar[str] = "page_rows"

    part: Part
    begin: Position
    valid: NDArray[np.bool_]
    rows: NDArray[np.uint8]

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.nbytes

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"part": self.part.value, "begin": self.begin, "row_bytes": self.rows.shape[1]}

    def frames(self) -> list[Buffer]:
        """Return validity and rows."""
        return [wire_bytes(self.valid, np.uint8), wire_bytes(self.rows, np.uint8)]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        valid, rows = frames_of(envelope, 2)
        head = _Rows.build(envelope.body, _Rows.arrays((valid,)))
        rows_VW = array(rows, np.uint8, (head.count, head.row_bytes))
        return cls(head.part, head.begin, head.valid, rows_VW)


class ShmPageRows(_Rows, frozen=True):
    """`PageRows` whose ``rows`` are in the request's shared-memory buffer, from byte ``at`` on.

    They take ``nbytes``. The buffer keeps the ``stamp`` until something else is written there, so
    the reader copies the rows first and checks the stamp afterwards
    (`bridge.transport.shared_memory`).
    """

    KIND: ClassVar[str] = "shm_page_rows"

    at: Offset
    stamp: Stamp
