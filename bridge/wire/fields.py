"""Types of header fields with their bounds, and arrays in payload frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import DTypeLike, NDArray

from bridge.errors import CorruptMessage
from bridge.layout.shape import MAX_LAYERS
from bridge.layout.shard import MAX_SHARDS

MAX_NAME_CHARS = 1024
MAX_LIST_ITEMS = 1 << 14
MAX_MAP_ITEMS = 1 << 16
MAX_COUNT = 1 << 62
MAX_ROW_BYTES = 16 << 20
MAX_ROW_NUMBER = 1 << 62
MAX_TRAJECTORY_TOKENS = 1 << 22
MAX_INCARNATION = 1 << 62

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Text = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Names = Annotated[tuple[Text, ...], Meta(max_length=MAX_LIST_ITEMS)]
TextByKey = Annotated[Mapping[Text, Text], Meta(max_length=MAX_MAP_ITEMS)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Position = Annotated[int, Meta(ge=0, le=MAX_TRAJECTORY_TOKENS)]
RowBytes = Annotated[int, Meta(ge=1, le=MAX_ROW_BYTES)]
Layer = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
ShardNumber = Annotated[int, Meta(ge=0, lt=MAX_SHARDS)]
Incarnation = Annotated[int, Meta(ge=0, le=MAX_INCARNATION)]


def array(frame: memoryview, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """View a frame as a read-only array; raise CorruptMessage when its size is not the shape's."""
    kind = np.dtype(dtype)
    expected = kind.itemsize
    for extent in shape:
        expected *= extent
    if frame.nbytes != expected:
        raise CorruptMessage(
            f"a frame has {frame.nbytes} bytes where {expected} are announced; resend the message"
        )
    if expected == 0:
        return np.empty(shape, dtype=kind)
    values = np.frombuffer(frame, dtype=kind).reshape(shape)
    values.flags.writeable = False
    return values


def vector(frame: memoryview, dtype: DTypeLike, minimum: int, maximum: int) -> NDArray[Any]:
    """View a frame as a vector of ``minimum`` to ``maximum`` items."""
    count = frame.nbytes // np.dtype(dtype).itemsize
    if not minimum <= count <= maximum:
        raise CorruptMessage(f"a frame holds {count} items, not {minimum} to {maximum}")
    return array(frame, dtype, (count,))


def wire_bytes(values: NDArray[Any], dtype: DTypeLike) -> memoryview:
    """View an array as the bytes of a frame, in wire order; copies only if it has to."""
    contiguous = np.ascontiguousarray(values, dtype=np.dtype(dtype))
    return contiguous.reshape(-1).view(np.uint8).data
