"""A trainer asks for records and gets a page of them: first what it is, then its rows in pieces.

A piece is small enough to stay in the caches of a CPU on its way from the bridge's memory through
the socket to the reader's.

Shapes: T = positions of a page, P = positions of a piece, V = those of them that have a row, W =
bytes of a row of the part in the page's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from bridge.errors import CorruptMessage
from bridge.layout import Part, RecordLayout, TensorSlice
from bridge.layout.shape import MAX_LAYERS
from bridge.layout.tensor_slice import ALL_VALUES
from bridge.wire.buffer import MAX_SEGMENT_BYTES, MAX_STAMP, BufferHandle, parsed_buffer
from bridge.wire.envelope import Buffer, Envelope
from bridge.wire.fields import MAX_COUNT, Fields, array, vector, wire_bytes
from bridge.wire.ingest import (
    MAX_ROW_BYTES,
    MAX_TRAJECTORY_TOKENS,
    TrajectoryState,
    layout_body,
    packed_kv_scales,
    parsed_kv_scales,
    parsed_layout,
    parsed_part,
    parsed_state,
)
from bridge.wire.message import HeaderOnly, frames_of

MAX_SITES = 64
MAX_SITE_CHARS = 64


@dataclass(frozen=True, slots=True)
class Fetch(HeaderOnly):
    """Ask for positions [start, stop) of a trajectory; None means all layers, sites, positions.

    ``tensor_slice`` is which values of fc2, K and V to send. With a ``buffer`` the page is no
    larger than fits there, and its rows are `ShmPageRows` if the daemon can write to it.
    """

    KIND: ClassVar[str] = "fetch"

    trajectory: str
    start: int = 0
    stop: int | None = None
    layers: tuple[int, ...] | None = None
    sites: tuple[str, ...] | None = None
    tensor_slice: TensorSlice = ALL_VALUES
    buffer: BufferHandle | None = None

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {
            "trajectory": self.trajectory,
            "start": self.start,
            "stop": self.stop,
            "layers": None if self.layers is None else list(self.layers),
            "sites": None if self.sites is None else list(self.sites),
            "tensor_slice": self.tensor_slice.to_dict(),
            "place": None if self.buffer is None else self.buffer.body(),
        }

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        layers = fields.optional_integers("layers", 0, MAX_LAYERS - 1)
        sites = fields.optional_texts("sites", MAX_SITES)
        if len(layers or ()) > MAX_LAYERS or any(
            len(site) > MAX_SITE_CHARS for site in sites or ()
        ):
            raise CorruptMessage("a question names more layers or longer sites than there can be")
        return cls(
            fields.name("trajectory"),
            fields.integer("start", 0, MAX_TRAJECTORY_TOKENS),
            fields.optional_integer("stop", 0, MAX_TRAJECTORY_TOKENS),
            layers,
            sites,
            _parsed_slice(fields),
            parsed_buffer(fields),
        )


@dataclass(frozen=True, slots=True)
class FetchReply:
    """What a page is: T positions from ``start``; ``length`` and ``revision`` are the trajectory's.

    Rows of each part of its layout follow in `PageRows`, under the same sequence number.

    ``revision`` changes whenever the trajectory does, so a reader of several pages can tell.
    ``versions`` indexes ``weight_versions`` and ``weights``, the label and the digest of the rows'
    weights, -1 where no row is recorded; ``engines`` indexes ``engine_ids`` likewise.
    A token id of -1 is a position of which no engine has told anything. ``rows`` are the engine's
    numbers of the rows, -1 where it told none, whether the bridge holds them or not.
    """

    KIND: ClassVar[str] = "fetch_reply"

    trajectory: str
    state: TrajectoryState
    revision: int
    length: int
    start: int
    layout: RecordLayout
    kv_scales: Mapping[int, tuple[float, float]]
    weight_versions: tuple[str, ...]
    engine_ids: tuple[str, ...]
    tokens: NDArray[np.int32]
    versions: NDArray[np.int32]
    engines: NDArray[np.int32]
    rows: NDArray[np.int64]
    weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.weights:
            object.__setattr__(self, "weights", ("",) * len(self.weight_versions))

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {
            "trajectory": self.trajectory,
            "state": self.state.value,
            "revision": self.revision,
            "length": self.length,
            "start": self.start,
            "positions": len(self.tokens),
            "layout": layout_body(self.layout),
            "kv_scales": packed_kv_scales(self.kv_scales),
            "weight_versions": list(self.weight_versions),
            "weights": list(self.weights),
            "engine_ids": list(self.engine_ids),
        }

    def frames(self) -> list[Buffer]:
        """Return the per-position arrays."""
        return [
            wire_bytes(self.tokens, "<i4"),
            wire_bytes(self.versions, "<i4"),
            wire_bytes(self.engines, "<i4"),
            wire_bytes(self.rows, "<i8"),
        ]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        tokens, versions, engines, rows = frames_of(envelope, 4)
        fields = Fields(envelope.body)
        layout = parsed_layout(fields)
        count = fields.integer("positions", 0, MAX_TRAJECTORY_TOKENS)
        weight_versions, weights = fields.texts("weight_versions"), fields.texts("weights")
        if len(weights) != len(weight_versions):
            raise CorruptMessage("a page has not one digest for each of its weight versions")
        return cls(
            fields.name("trajectory"),
            parsed_state(fields),
            fields.integer("revision", 0, MAX_COUNT),
            fields.integer("length", 0, MAX_TRAJECTORY_TOKENS),
            fields.integer("start", 0, MAX_TRAJECTORY_TOKENS),
            layout,
            parsed_kv_scales(fields),
            weight_versions,
            fields.texts("engine_ids"),
            array(tokens, "<i4", (count,)),
            array(versions, "<i4", (count,)),
            array(engines, "<i4", (count,)),
            array(rows, "<i8", (count,)),
            weights,
        )


@dataclass(frozen=True, slots=True)
class PageRows:
    """Rows of one part for P positions of a page, from its position ``begin`` on.

    ``valid`` is bool [P]; ``rows`` is uint8 [V, W], those of the valid positions one after the
    other: what is missing takes no bytes.
    """

    KIND: ClassVar[str] = "page_rows"

    part: Part
    begin: int
    valid: NDArray[np.bool_]
    rows: NDArray[np.uint8]

    @property
    def count(self) -> int:
        """How many rows there are."""
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
        valid_frame, rows_frame = frames_of(envelope, 2)
        fields = Fields(envelope.body)
        valid_P = vector(valid_frame, np.uint8, MAX_TRAJECTORY_TOKENS).astype(np.bool_)
        row_bytes = fields.integer("row_bytes", 1, MAX_ROW_BYTES)
        return cls(
            parsed_part(fields),
            fields.integer("begin", 0, MAX_TRAJECTORY_TOKENS),
            valid_P,
            array(rows_frame, np.uint8, (int(np.count_nonzero(valid_P)), row_bytes)),
        )


@dataclass(frozen=True, slots=True)
class ShmPageRows:
    """`PageRows` whose ``rows`` are in the request's shared-memory buffer, from byte ``at`` on.

    They take ``nbytes``. The buffer keeps the ``stamp`` until something else is written there, so
    the reader copies the rows first and checks the stamp afterwards
    (`bridge.transport.shared_memory`).
    """

    KIND: ClassVar[str] = "placed_rows"

    part: Part
    begin: int
    valid: NDArray[np.bool_]
    row_bytes: int
    at: int
    stamp: int

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(np.count_nonzero(self.valid))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.count * self.row_bytes

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {
            "part": self.part.value,
            "begin": self.begin,
            "row_bytes": self.row_bytes,
            "at": self.at,
            "stamp": self.stamp,
        }

    def frames(self) -> list[Buffer]:
        """Return validity."""
        return [wire_bytes(self.valid, np.uint8)]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        (valid_frame,) = frames_of(envelope, 1)
        fields = Fields(envelope.body)
        return cls(
            parsed_part(fields),
            fields.integer("begin", 0, MAX_TRAJECTORY_TOKENS),
            vector(valid_frame, np.uint8, MAX_TRAJECTORY_TOKENS).astype(np.bool_),
            fields.integer("row_bytes", 1, MAX_ROW_BYTES),
            fields.integer("at", 0, MAX_SEGMENT_BYTES),
            fields.integer("stamp", 0, MAX_STAMP),
        )


def _parsed_slice(fields: Fields) -> TensorSlice:
    """Return a slice whose bounds are no further checked: that is for the record's layout to do."""
    try:
        return TensorSlice.from_dict(fields.mapping("tensor_slice", 2))
    except (TypeError, ValueError) as error:
        raise CorruptMessage(f"header field tensor_slice is not valid ({error})") from error
