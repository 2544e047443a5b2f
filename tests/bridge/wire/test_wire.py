from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import CorruptMessage, SchemaMismatch
from bridge.layout import ModelShape, Part, RecordLayout, Site, TensorSlice
from bridge.layout.rank_shards import rank_shards
from bridge.wire import (
    MESSAGES,
    SCHEMA_VERSION,
    Ack,
    BufferHandle,
    Digests,
    DigestsReply,
    Dropped,
    Error,
    Fetch,
    FetchReply,
    Gc,
    GcReply,
    Hello,
    List,
    ListReply,
    Message,
    Observe,
    ObserveReply,
    PageRows,
    Pin,
    Ping,
    Policy,
    Pong,
    Rows,
    RowsInShm,
    ShmPageRows,
    Stats,
    StatsReply,
    Step,
    Trajectory,
    TrajectoryState,
    TrajectorySummary,
    WeightDigests,
    decode,
    encode,
)
from bridge.wire.envelope import MAX_FRAMES, MAX_HEADER_BYTES, seal

_SHAPE = ModelShape(4, 64, 32, 8, 2, 2, 32, (0, 1, 2, 3), (1, 3))
_LAYOUT = RecordLayout(_SHAPE, (2, 3), (Site.FC1, Site.K, Site.V, Site.ROUTES), bits=1)
_WITH_FC2 = RecordLayout(_SHAPE, (2, 3), tuple(Site), bits=2)
_FORWARD = np.arange(3 * _LAYOUT.row_bytes(Part.FORWARD), dtype=np.uint8).reshape(3, -1)
_KV = np.arange(2 * _LAYOUT.row_bytes(Part.KV), dtype=np.uint8).reshape(2, -1)
_ROWS = Rows.of("e", Part.FORWARD, np.array([5, 6, 9]), _FORWARD, "v1")

EXAMPLES: list[Message] = [
    Ack((4, 5)),
    Digests("v1"),
    Dropped("e", 3, 4),
    Dropped("e", 3, 4, 1, incarnation=1 << 62),
    DigestsReply({"e": {"w": "00ff"}, "f": {}}),
    Error("StoreFull", "the store is full; free it"),
    Fetch("t", 3, 9, (2,), ("fc1",)),
    Fetch("t"),
    Fetch("t", tensor_slice=TensorSlice((16, 32), (0, 1))),
    RowsInShm(_ROWS.header, BufferHandle(1, 0, "", 0, 1 << 20), (1 << 64) - 1),
    Fetch("t", buffer=BufferHandle((1 << 22) - 1, 7, "0f" * 16, 4096, 12 << 20)),
    FetchReply(
        "t",
        TrajectoryState.OPEN,
        revision=3,
        length=9,
        start=2,
        layout=_LAYOUT,
        kv_scales={3: (0.5, 2.0)},
        weight_versions=("v1", "v2"),
        engine_ids=("e",),
        tokens=np.array([1, 2, -1], dtype=np.int32),
        versions=np.array([0, 1, -1], dtype=np.int32),
        engines=np.array([0, 0, -1], dtype=np.int32),
        rows=np.array([5, 1 << 48, -1]),
        weights=("ab" * 32, ""),
    ),
    PageRows(Part.KV, 1, np.array([True, False, True]), _KV),
    ShmPageRows(Part.KV, 1, np.array([True, False, True]), 34, at=99, stamp=(1 << 64) - 1),
    Hello("e", _LAYOUT, {1: (1.0, 2.0)}, {"path": "a model"}, incarnation=7),
    Hello("e", _LAYOUT, shards=rank_shards(_LAYOUT, 2), shard=1),
    Hello("e", _WITH_FC2, shards=rank_shards(_WITH_FC2, 4, ep=2), shard=3),
    List(5, "t"),
    ListReply((TrajectorySummary("t", "open", 5, 4, 5, 1, 0, ("v1",), 99),), 7),
    Ping(),
    Pong(),
    _ROWS,
    _ROWS.header,
    Rows.of("e", Part.FORWARD, np.array([5, 6, 9]), _FORWARD, "v1", 2, "0f" * 32, 9).header,
    Observe(),
    ObserveReply(b'{"status": 1}'),
    Stats(),
    StatsReply("disk", *range(23)),
    Step(3),
    Pin(("t",), 60),
    Gc(Policy(keep=2, expire_s=0)),
    Gc(Policy(max_version_diff=1)),
    GcReply(1, 2, 3),
    Trajectory("e", "t", 3, np.array([7, 8]), np.array([2, -1]), TrajectoryState.FINISHED),
    Trajectory(
        "e",
        "t",
        3,
        np.array([7, 8]),
        np.array([2, -1]),
        TrajectoryState.OPEN,
        rollout=1 << 62,
        continues=True,
        incarnation=5,
    ),
    WeightDigests("e", "v1", {"w": "00ff"}),
    WeightDigests("e", "v1", {"w": "00ff"}, incarnation=3),
]


def _same(a: Any, b: Any) -> bool:
    if hasattr(a, "KIND"):
        return type(a) is type(b) and all(
            _same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__
        )
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def _bytes(message: Message, seq: int = 4) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, seq)]


def test_every_kind_of_message_has_an_example_here() -> None:
    assert {type(message) for message in EXAMPLES} == set(MESSAGES.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.KIND)
def test_a_message_survives_the_round_trip(message: Message) -> None:
    decoded, seq = decode(_bytes(message, seq=12))
    assert _same(message, decoded)
    assert seq == 12


def test_record_bytes_are_passed_on_and_viewed_without_a_copy() -> None:
    frames = encode(_ROWS, 0)
    assert np.shares_memory(np.frombuffer(frames[-1], dtype=np.uint8), _ROWS.payload)
    decoded, _ = decode(frames)
    assert isinstance(decoded, Rows)
    assert np.shares_memory(decoded.payload, _ROWS.payload)


@given(st.data())
def test_no_flipped_bit_goes_unnoticed(data: st.DataObject) -> None:
    frames = _bytes(data.draw(st.sampled_from(EXAMPLES)))
    number = data.draw(st.sampled_from([n for n, frame in enumerate(frames) if frame]))
    bit = data.draw(st.integers(0, 8 * len(frames[number]) - 1))
    altered = bytearray(frames[number])
    altered[bit // 8] ^= 1 << bit % 8
    frames[number] = bytes(altered)
    with pytest.raises((CorruptMessage, SchemaMismatch)):
        decode(frames)


@given(st.data())
def test_no_truncation_goes_unnoticed(data: st.DataObject) -> None:
    frames = _bytes(data.draw(st.sampled_from(EXAMPLES)))
    number = data.draw(st.sampled_from([n for n, frame in enumerate(frames) if frame]))
    if data.draw(st.booleans()):
        frames[number] = frames[number][: data.draw(st.integers(0, len(frames[number]) - 1))]
    else:
        del frames[number]
    with pytest.raises((CorruptMessage, SchemaMismatch)):
        decode(frames)


@given(st.lists(st.binary(max_size=200), max_size=MAX_FRAMES + 2))
def test_random_bytes_are_refused_in_one_sentence(frames: list[bytes]) -> None:
    with pytest.raises((CorruptMessage, SchemaMismatch), match=r"."):
        decode(frames)


_TEXTS = st.text("ab#é\0", max_size=5)
_VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, -1, 1 << 63, 0.5, float("nan"), b"", "forward", "fc1"])
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=10,
)


def _maps_in(value: Any) -> list[dict[str, Any]]:
    """All maps of a header, so that every level of it gets senseless values."""
    if isinstance(value, dict):
        return [value, *(found for item in value.values() for found in _maps_in(item))]
    return []


@settings(max_examples=400)
@given(st.data())
def test_intact_messages_with_senseless_fields_are_parsed_or_refused(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(EXAMPLES))
    body = copy.deepcopy(message.body())
    for _ in range(data.draw(st.integers(1, 3))):
        fields = data.draw(st.sampled_from(_maps_in(body)))
        fields[data.draw(st.sampled_from([*fields, "other"]))] = data.draw(_VALUES)
    frames = list(message.frames())
    if frames and data.draw(st.booleans()):
        frames[data.draw(st.integers(0, len(frames) - 1))] = data.draw(st.binary(max_size=64))
    sealed = seal(message.KIND, 1, body, frames)
    try:
        decoded, _ = decode(sealed)
    except (CorruptMessage, SchemaMismatch):
        return
    assert type(decoded) is type(message)


def test_another_schema_version_is_named_before_anything_else_is_read() -> None:
    head, *rest = _bytes(Ping())
    other = head[:4] + (SCHEMA_VERSION + 1).to_bytes(2, "little") + b"\0" * len(head[6:])
    with pytest.raises(SchemaMismatch, match=f"schema {SCHEMA_VERSION + 1}.*same sglang-trace"):
        decode([other, *rest])


def test_a_header_cannot_announce_more_than_it_has() -> None:
    head = bytearray(_bytes(Ping())[0])
    head[8:12] = (MAX_HEADER_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(CorruptMessage, match="announced"):
        decode([bytes(head)])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Rows.of("", Part.FORWARD, np.array([1]), _FORWARD[:1], "v"), "engine_id"),
        (Rows.of("e", Part.FORWARD, np.array([-1]), _FORWARD[:1], "v"), "negative"),
        (Rows.of("e", Part.FORWARD, np.array([1 << 62 | 1]), _FORWARD[:1], "v"), "beyond 2"),
        (Rows.of("e", Part.FORWARD, np.array([1, 2]), _FORWARD[:1], "v"), "announced"),
        (Rows.of("e", Part.FORWARD, np.array([1]), _FORWARD[:1], "v" * 2000), "weight_version"),
        (Trajectory("e", "t", -1, np.array([1]), np.array([1]), TrajectoryState.OPEN), "start"),
        (Trajectory("e", "t", 1 << 22, np.array([1]), np.array([1]), TrajectoryState.OPEN), "sta"),
        (Trajectory("e", "t", 0, np.array([-1]), np.array([1]), TrajectoryState.OPEN), "negative"),
        (Trajectory("e", "t", 0, np.array([1]), np.array([-2]), TrajectoryState.OPEN), "invalid"),
        (Trajectory("e", "t", 0, np.array([1, 2]), np.array([1]), TrajectoryState.OPEN), "annou"),
        (Fetch("t", -1), "start"),
    ],
)
def test_values_out_of_range_are_refused(message: Message, why: str) -> None:
    with pytest.raises(CorruptMessage, match=why):
        decode(_bytes(message))
