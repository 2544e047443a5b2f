"""Every size that a message announces is bounded before anything is made of that size."""

from __future__ import annotations

import copy
import dataclasses
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from bridge.client.assemble import Page, join
from bridge.client.client import TraceClient
from bridge.client.paging import Paging
from bridge.errors import CorruptMessage, LayoutError, SchemaMismatch, StoreFull, TraceError
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.producer.producer import RecordProducer
from bridge.store import MemoryStore, Store
from bridge.wire import (
    Ack,
    Error,
    Fetch,
    FetchReply,
    Hello,
    Message,
    PageRows,
    Ping,
    Pong,
    decode,
    encode,
)
from bridge.wire import envelope as wire
from bridge.wire.buffer import MAX_SEGMENT_BYTES
from bridge.wire.envelope import checksum, seal
from bridge.wire.refusal import refusal
from tests.bridge.wire.test_wire import EXAMPLES

_HUGE = 1 << 60
_REFUSED = (CorruptMessage, SchemaMismatch)
_BUFFER = {"pid": 1, "fd": 3, "key": "0" * 32, "offset": 0, "nbytes": 1}
_WHOLE = next(message for message in EXAMPLES if message.KIND == "hello").shards[0].to_dict()


def _example(kind: str) -> Message:
    return next(message for message in EXAMPLES if kind == message.KIND)


def _with(kind: str, **fields: Any) -> list[Any]:
    """A message of a kind, intact but for the values of some fields; "a.b" is a field of a map."""
    message = _example(kind)
    body = copy.deepcopy(message.body())
    for path, value in fields.items():
        *maps, name = path.split("__")
        target = body
        for step in maps:
            target = target[step]
        assert name in target
        target[name] = value
    return seal(kind, 1, body, message.frames())


def _headed(header: bytes) -> list[bytes]:
    """A message of just this packed header, with its right checksum."""
    preamble = wire._PREAMBLE.pack(b"TRCE", wire.SCHEMA_VERSION, 0, len(header), checksum(header))
    return [preamble + header]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("fetch_reply", {"length": _HUGE}),
        ("fetch_reply", {"start": _HUGE}),
        ("page_rows", {"begin": _HUGE}),
        ("page_rows", {"row_bytes": _HUGE}),
        ("page_rows", {"row_bytes": 0}),
        ("rows", {"row_bytes": _HUGE}),
        ("block", {"row_bytes": _HUGE}),
        ("trajectory", {"start": _HUGE}),
        ("fetch", {"start": _HUGE}),
        ("fetch", {"stop": _HUGE}),
        ("fetch", {"layers": [_HUGE]}),
        ("fetch", {"layers": [0] * (wire.MAX_LIST_ITEMS + 1)}),
        ("fetch", {"sites": ["fc1"] * 65}),
        ("pin", {"lease_s": _HUGE}),
        ("pin", {"trajectories": ["t"] * (wire.MAX_LIST_ITEMS + 1)}),
        ("pin", {"trajectories": ["t" * 1025]}),
        ("step", {"step": _HUGE}),
        ("list", {"prefix": "t" * 1025}),
        ("ack", {"seqs": [-_HUGE]}),
        ("error", {"text": "s" * 4097}),
        ("weight_digests", {"digests": {"w" * 1025: "00"}}),
        ("weight_digests", {"digests": {str(i): "" for i in range(wire.MAX_MAP_ITEMS + 1)}}),
        ("digests_reply", {"by_engine": {"e" * 1025: {}}}),
        ("hello", {"model": {str(i): "" for i in range(65)}}),
        ("hello", {"kv_scales": [[_HUGE, 1.0, 1.0]]}),
        ("hello", {"kv_scales": [[0, float("nan"), 1.0]]}),
        ("hello", {"layout": {"x": [[]] * 40_000}}),
        ("hello", {"layout__bits": _HUGE}),
        ("hello", {"layout__layers": list(range(513))}),
        ("hello", {"layout__shape__num_layers": _HUGE}),
        ("hello", {"layout__shape__top_k": _HUGE}),
        ("hello", {"layout__shape__num_experts": _HUGE}),
        ("hello", {"layout__shape__hidden_size": _HUGE}),
        ("hello", {"layout__shape__moe_intermediate_size": _HUGE}),
        ("hello", {"layout__shape__num_kv_heads": _HUGE}),
        ("hello", {"layout__shape__head_dim": _HUGE}),
        ("hello", {"layout__shape__moe_layers": [0] * (1 << 13)}),
        ("hello", {"layout__tensor_slice": {"fc2": [0, _HUGE]}}),
        ("hello", {"shards": [_WHOLE] * 65}),
        ("hello", {"shards": []}),
        ("hello", {"shard": 1}),
        ("block", {"shard": 64}),
        ("trajectory", {"shard": _HUGE}),
        ("fetch", {"tensor_slice": {"heads": [0] * 100}}),
        ("fetch", {"buffer": {str(i): 0 for i in range(6)}}),
        ("fetch", {"buffer": _BUFFER | {"pid": 0}}),
        ("fetch", {"buffer": _BUFFER | {"pid": _HUGE}}),
        ("fetch", {"buffer": _BUFFER | {"fd": -1}}),
        ("fetch", {"buffer": _BUFFER | {"key": "0" * 33}}),
        ("fetch", {"buffer": _BUFFER | {"offset": MAX_SEGMENT_BYTES + 1}}),
        ("fetch", {"buffer": _BUFFER | {"nbytes": MAX_SEGMENT_BYTES + 1}}),
        ("fetch", {"buffer": _BUFFER | {"nbytes": 0}}),
        ("shm_page_rows", {"begin": _HUGE}),
        ("shm_page_rows", {"row_bytes": _HUGE}),
        ("shm_page_rows", {"row_bytes": 0}),
        ("shm_page_rows", {"at": MAX_SEGMENT_BYTES + 1}),
        ("shm_page_rows", {"stamp": -1}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_size_beyond_its_limit_is_refused(kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(_REFUSED):
        decode(_with(kind, **fields))


def test_the_fields_of_very_many_shards_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.wire.record_fields.MAX_SHARD_FIELDS", 100)
    monkeypatch.setattr("bridge.layout.Shard.from_dict", lambda *_: pytest.fail("one was made"))
    with pytest.raises(SchemaMismatch, match="fields of all shards"):
        decode(_with("hello", shards=[_WHOLE] * 20))


def test_a_message_of_too_many_or_too_large_frames_is_refused_before_its_header_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CorruptMessage, match="1 to 8 frames"):
        decode([b""] * 9)
    monkeypatch.setattr(wire, "_open_header", lambda frame: pytest.fail("the header was read"))
    frame = np.zeros(wire.MAX_FRAME_BYTES + 1, dtype=np.uint8).data
    with pytest.raises(CorruptMessage, match="a frame is over"):
        decode([b"", frame])
    with pytest.raises(CorruptMessage, match="a message is over"):
        decode([b"", frame[1:], frame[1:], b"x"])


_DEPTH = 1000
_BOMBS = {
    "a list announced of 4 billion items": b"\xdd\xff\xff\xff\xff",
    "a map announced of 4 billion items": b"\xdf\xff\xff\xff\xff",
    "a text announced of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "a thousand lists in each other, each announced long": b"\xdc\x40\x00" * _DEPTH,
    "a thousand maps in each other": b"\x81\xa1a" * _DEPTH,
    "more nesting than there is stack": b"\x91" * 100_000,
    "many empty maps": b"\x9f" * 5 + b"\x80" * 200_000,
    "many empty lists": msgpack.packb([[[] for _ in range(16_000)] for _ in range(20)]),
    "bytes": b"\xc6\x00\x00\x00\x01x",
    "an extension": b"\xc7\x01\x05x",
    "a time": msgpack.packb(msgpack.Timestamp(0)),
}


@pytest.mark.parametrize("name", list(_BOMBS))
def test_a_header_that_swells_is_refused_while_it_is_read(name: str) -> None:
    frames = _headed(b"\x84\xa4type" + _BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptMessage):
            decode(frames)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 192 << 20


def test_the_largest_objects_a_header_can_hold_take_a_bounded_multiple_of_its_bytes() -> None:
    texts = [["ab"] * 16_000 for _ in range(20)]
    header = msgpack.packb({"type": "ping", "seq": 0, "sums": [], "body": {"x": texts}})
    frames = _headed(header)
    tracemalloc.start()
    try:
        assert decode(frames) == (Ping(), 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * len(header)


def test_a_layout_nested_deeper_than_it_can_be_packed_is_refused() -> None:
    header = msgpack.packb({"type": "hello", "seq": 0, "sums": []})
    nested = b"\x91" * 700 + b"\xc0"
    body = b"\xa4body\x82\xa9engine_id\xa1e\xa6layout\x81\xa1x" + nested
    with pytest.raises(_REFUSED, match="layout"):
        decode(_headed(bytes([header[0] + 1]) + header[1:] + body))


def test_a_layout_of_absurdly_many_fields_is_refused() -> None:
    layers = tuple(range(512))
    shape = ModelShape(512, 16, 16, 64, 64, 1, 16, layers, ())
    with pytest.raises(LayoutError, match="fields of a row"):
        RecordLayout(shape, layers, (Site.FC2,))


def test_a_sentence_of_any_length_arrives_cut() -> None:
    told, _ = decode(encode(refusal(TraceError("x" * 100_000)), 1))
    assert isinstance(told, Error)
    assert set(told.text) == {"x"}


# --- what small messages make the daemon hold


def test_rows_and_positions_far_apart_cannot_take_more_than_the_memory_limit(
    serve: Callable[[Store], str], layout: RecordLayout
) -> None:
    limit = 32 << 20
    endpoint = serve(MemoryStore(limit))
    with closing(RecordProducer(endpoint)) as producer, TraceClient(endpoint) as client:
        producer.register("e", layout)
        width = layout.row_bytes(Part.FORWARD)
        apart = np.arange(20_000) << 20
        producer.send_rows(Part.FORWARD, apart, np.zeros((20_000, width), np.uint8), "v")
        with pytest.raises(StoreFull, match=r"without large gaps|memory is full"):
            producer.flush(timeout_s=1.0)
        for number in range(100):
            producer.send_trajectory(f"t{number}", (1 << 22) - 1, [1], [0], "open")
        with pytest.raises(StoreFull, match="without large gaps"):
            producer.flush(timeout_s=2.0)
        stats = client.stats()
        assert stats.full
        assert stats.index_bytes + stats.memory_bytes <= limit


def test_engines_cannot_introduce_themselves_beyond_the_memory_limit(
    serve: Callable[[Store], str], layout: RecordLayout
) -> None:
    limit = 1 << 20
    endpoint = serve(MemoryStore(limit))
    model = {str(number): "x" * 1000 for number in range(64)}
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    for number in range(100):
        socket.send_multipart(encode(Hello(f"engine {number}", layout, {}, model), 0))
    answers = [decode(socket.recv_multipart())[0] for _ in range(100)]
    context.destroy(linger=0)
    with TraceClient(endpoint) as client:
        stats = client.stats()
    assert 0 < stats.engines == sum(isinstance(answer, Ack) for answer in answers) < 100
    assert {answer.code for answer in answers if isinstance(answer, Error)} == {"StoreFull"}
    assert stats.index_bytes <= limit


def test_pins_are_bounded_in_number(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.daemon.retention._MAX_PINS", 3)
    with TraceClient(endpoint) as client:
        client.pin(["a", "b", "c"])
        client.pin(["c", "a"])
        with pytest.raises(StoreFull, match="3 trajectories can be pinned"):
            client.pin(["d"])
        client.unpin(["a"])
        client.pin(["d"])


def test_a_huge_frame_and_very_many_frames_end_neither_the_daemon_nor_its_service(
    endpoint: str,
) -> None:
    context = zmq.Context()
    huge, many = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for socket in (huge, many):
        socket.connect(endpoint)
    huge.send(bytes(wire.MAX_FRAME_BYTES + 1))
    many.send_multipart([b""] * 20_000)
    assert many.poll(10_000)
    answer, _ = decode(many.recv_multipart())
    assert isinstance(answer, Error)
    many.send_multipart(encode(Ping(), 5))
    assert many.poll(10_000)
    assert decode(many.recv_multipart()) == (Pong(), 5)
    assert not huge.poll(0)
    context.destroy(linger=0)


# --- what a client makes of a reply


def test_a_client_makes_no_tensors_for_more_positions_than_its_machine_can_hold() -> None:
    page = _example("fetch_reply")
    assert isinstance(page, FetchReply)
    columns = 1 << 20
    shape = dataclasses.replace(page.layout.shape, num_kv_heads=columns // 32, head_dim=32)
    wide = RecordLayout(shape, (1, 3), (Site.K, Site.V), bits=4)
    far = replace(page, layout=wide, start=0, length=1 << 22)
    with pytest.raises(TraceError, match="fetch a part of them"):
        join(iter([Page(far, iter([]))]), None)


def test_a_client_refuses_pages_that_it_did_not_ask_for() -> None:
    page = _example("fetch_reply")
    assert isinstance(page, FetchReply)
    short = Page(replace(page, start=0, length=4), iter([]))
    with pytest.raises(CorruptMessage, match="does not continue"):
        join(iter([short, short]), None)


def _piece(page: FetchReply, part: Part, begin: int, count: int, more_bytes: int = 0) -> PageRows:
    row_bytes = page.layout.row_bytes(part) + more_bytes
    rows = np.zeros((count, row_bytes), dtype=np.uint8)
    return PageRows(part, begin, np.ones(count, dtype=np.bool_), rows)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda page: _piece(page, Part.KV, 0, 3),
        lambda page: _piece(page, Part.FORWARD, 1, 2),
        lambda page: _piece(page, Part.FORWARD, 0, 4),
        lambda page: _piece(page, Part.FORWARD, 0, 3, more_bytes=1),
    ],
    ids=["another part", "not the next positions", "beyond the page", "rows of another width"],
)
def test_a_client_refuses_rows_that_are_not_next_in_their_page(
    wrong: Callable[[FetchReply], PageRows],
) -> None:
    page = _example("fetch_reply")
    assert isinstance(page, FetchReply)

    class Bridge:
        @contextmanager
        def rows(self, *_: Any) -> Iterator[PageRows]:
            yield wrong(page)

    paging = Paging(Bridge(), 0.0)  # type: ignore[arg-type]
    with pytest.raises(CorruptMessage, match="fetch again"):
        next(paging.rows(page, 0))


@pytest.mark.parametrize("changes", [{"start": 4}, {"start": 6}, {"tokens": np.empty(0, np.int32)}])
def test_a_client_refuses_a_page_that_does_not_begin_where_the_one_before_it_ends(
    changes: dict[str, Any],
) -> None:
    first = _example("fetch_reply")
    assert isinstance(first, FetchReply)
    right = replace(first, start=5)  # of positions 2 to 8 the first page has three
    assert (first.start, len(first.tokens), first.length) == (2, 3, 9)

    class Bridge:
        def __init__(self, *pages: FetchReply) -> None:
            self.asked: list[Fetch] = []
            self.pages = list(pages)

        def send(self, request: Fetch) -> int:
            self.asked.append(request)
            return len(self.asked)

        def receive(self, *_: Any) -> FetchReply:
            return self.pages.pop(0)

        def complete(self, _: int) -> None: ...

        def cancel(self, seqs: Iterator[int]) -> None:
            list(seqs)

    def heads(bridge: Bridge) -> list[int]:
        paging = Paging(bridge, 0.0)  # type: ignore[arg-type]
        return [page.head.start for page in paging._pages(Fetch("t"), 0)]

    bridge = Bridge(first, right, replace(first, start=8))
    assert heads(bridge) == [2, 5, 8]
    assert [(each.start, each.stop) for each in bridge.asked] == [(5, 8), (8, 9)]
    with pytest.raises(CorruptMessage, match="does not continue"):
        heads(Bridge(first, replace(right, **changes)))
