"""Header fields about record layouts: their wire forms, and how they are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import isfinite
from typing import Any

import msgpack

from bridge.errors import CorruptMessage, LayoutError, SchemaMismatch
from bridge.layout import Part, RecordLayout, Shard, TensorSlice
from bridge.layout.shape import MAX_LAYERS, check_range
from bridge.layout.shard import MAX_SHARD_FIELDS, MAX_SHARDS, check_shards
from bridge.wire.fields import MAX_LIST_ITEMS

MAX_LAYOUT_BYTES = 1 << 15
KvScales = Mapping[int, tuple[float, float]]


@lru_cache(maxsize=64)
def _packed_layout(layout: RecordLayout) -> dict[str, Any]:
    """Return the wire form of a layout; callers must not change it."""
    return layout.to_dict()


def _layout(body: dict[str, Any], _: dict[str, Any]) -> RecordLayout:
    """Return the layout; raise SchemaMismatch if it is not a valid one."""
    try:
        packed = msgpack.packb(_mapping(body, "layout"))
    except ValueError as error:  # it nests deeper than msgpack writes
        raise CorruptMessage(f"the record layout is not valid ({error})") from error
    if len(packed) > MAX_LAYOUT_BYTES:
        raise CorruptMessage(f"a record layout is over the limit of {MAX_LAYOUT_BYTES} bytes")
    return _unpacked_layout(packed)


@lru_cache(maxsize=64)
def _unpacked_layout(packed: bytes) -> RecordLayout:
    """Parse a layout once: every page of a fetch has the same one."""
    return RecordLayout.from_dict(msgpack.unpackb(packed))


def _packed_kv_scales(scales: KvScales) -> list[list[float]]:
    """Return [layer, k, v] triples, because maps in a header have string keys only."""
    return [[layer, float(k), float(v)] for layer, (k, v) in sorted(scales.items())]


def _kv_scales(body: dict[str, Any], _: dict[str, Any]) -> KvScales:
    """Return layer -> (K scale, V scale)."""
    scales: dict[int, tuple[float, float]] = {}
    for item in _items(body, "kv_scales", MAX_LIST_ITEMS):
        if type(item) is not list or [type(value) for value in item] != [int, float, float]:
            raise CorruptMessage("header field kv_scales is not a list of [layer, k, v]")
        if not (0 <= item[0] < MAX_LAYERS and isfinite(item[1]) and isfinite(item[2])):
            raise CorruptMessage("kv_scales has a layer out of range or a scale that is not finite")
        scales[item[0]] = (item[1], item[2])
    return scales


def _shards(body: dict[str, Any], fields: dict[str, Any]) -> tuple[Shard, ...]:
    """Return the shards of an engine's ranks; raise SchemaMismatch unless they make whole rows."""
    layout: RecordLayout = fields["layout"]
    items = _items(body, "shards", MAX_SHARDS)
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


def _tensor_slice(body: dict[str, Any], _: dict[str, Any]) -> TensorSlice:
    """Return a slice; the record's layout checks its bounds."""
    try:
        return TensorSlice.from_dict(_mapping(body, "tensor_slice", 2))
    except (TypeError, ValueError) as error:
        raise CorruptMessage(f"header field tensor_slice is not valid ({error})") from error


def _mapping(body: dict[str, Any], name: str, maximum: int = 64) -> dict[str, Any]:
    value = body.get(name)
    if type(value) is not dict or len(value) > maximum:
        raise CorruptMessage(f"header field {name} is not a map of at most {maximum} items")
    return value


def _items(body: dict[str, Any], name: str, maximum: int) -> list[Any]:
    value = body.get(name)
    if type(value) is not list or len(value) > maximum:
        raise CorruptMessage(f"header field {name} is not a list of at most {maximum} items")
    return value


Pack = Callable[[Any], Any]
Parse = Callable[[dict[str, Any], dict[str, Any]], Any]

# By field name, in the order of parsing. A parser gets the header and the fields before its own.
RECORD_FIELDS: dict[str, tuple[Pack, Parse]] = {
    "layout": (_packed_layout, _layout),
    "kv_scales": (_packed_kv_scales, _kv_scales),
    "shards": (lambda shards: [shard.to_dict() for shard in shards], _shards),
    "tensor_slice": (TensorSlice.to_dict, _tensor_slice),
}
