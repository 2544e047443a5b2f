"""What all clients together can make a daemon hold, and that each can have some of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from bridge.client.client import TraceClient
from bridge.daemon.memory.budget import Budget
from bridge.daemon.memory.waiting import WaitingRequests
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import TooManyRequests
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.producer.producer import RecordProducer
from bridge.store.payloads import room_of
from bridge.wire import Error, Fetch, FetchReply, PageRows, decode, encode

MIB = 1 << 20
LIMIT = 64 * MIB
SHAPE = ModelShape(2, 1024, 256, 4, 2, 1, 128, (0, 1), (0, 1))
WIDE = RecordLayout(SHAPE, (0, 1), (Site.FC1, Site.K, Site.V, Site.ROUTES), bits=4)
TOKENS = 24_000
# What daemons took before they held anything, by endpoint.
EMPTY: dict[str, int] = {}


@given(st.integers(1, 1 << 45), st.integers(0, 1000))
def test_records_and_what_is_on_its_way_fit_the_limit(limit: int, clients: int) -> None:
    budget = Budget.of(limit)
    if limit >= 16 * MIB:
        assert room_of(limit) + budget.answers <= limit
        assert budget.requests + budget.shm + budget.batch <= limit // 4 + 64 * MIB
    assert budget.min_share <= budget.share(clients) <= budget.answers
    assert clients * budget.share(clients) <= max(budget.answers, clients * budget.min_share)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000), st.booleans()), max_size=300))
def test_questions_wait_in_turn_and_none_pushes_out_another(
    story: list[tuple[int, int, bool]],
) -> None:
    budget = Budget.of(8 * MIB)
    waiting = WaitingRequests(budget)
    model: dict[bytes, list[bytes]] = {}
    for client, size, puts in story:
        peer, question = b"%d" % client, bytes(size)
        if puts:
            try:
                waiting.put(peer, question)
            except TooManyRequests:
                assert model.get(peer)  # a client that has none waiting is never refused
            else:
                model.setdefault(peer, []).append(question)
        elif model.get(peer):
            assert waiting.take(peer) == model[peer].pop(0)
            if model[peer]:
                assert waiting.peers()[-1] == peer
        assert set(waiting.peers()) == {peer for peer, held in model.items() if held}
        assert waiting.nbytes <= budget.requests + 6 * (16 << 10)


@contextmanager
def _reader(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A client that takes two messages at most unless it is read."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 1 << 16)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        yield socket


def _resident(bridge: EmbeddedBridge) -> int:
    lines = Path(f"/proc/{bridge.process.pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.fixture
def bridge(start_process: Callable[..., EmbeddedBridge]) -> EmbeddedBridge:
    """A daemon whose memory is nearly full of one trajectory."""
    bridge = start_process(memory_limit=f"{LIMIT}")
    EMPTY[bridge.endpoint] = _resident(bridge)
    with RecordProducer(bridge.endpoint) as engine:
        engine.register("e", WIDE)
        for part in Part:
            rows = np.full((500, WIDE.row_bytes(part)), 7, np.uint8)
            for first in range(0, TOKENS, 500):
                engine.send_rows(part, range(first, first + 500), rows, "v")
        engine.send_trajectory("t", 0, range(TOKENS), range(TOKENS), "finished")
    return bridge


def test_many_clients_that_do_not_read_take_no_more_than_the_limit_and_delay_nobody(
    bridge: EmbeddedBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.client.connection.is_loopback", lambda _: False)
    slow = [_reader(bridge.endpoint) for _ in range(60)]
    try:
        for opened in slow:
            socket = opened.__enter__()
            for seq in range(200):
                socket.send_multipart(encode(Fetch("t"), seq))
        for _ in range(20):
            with TraceClient(bridge.endpoint) as client:
                records = client.fetch("t", stop=2000)
                assert records.forward_valid.all()
                assert (records.kv.numpy() == 7).all()
        assert _resident(bridge) - EMPTY[bridge.endpoint] <= LIMIT * 5 // 4
    finally:
        for opened in slow:
            opened.__exit__(None, None, None)


def test_a_clients_questions_are_refused_beyond_its_share_and_those_of_others_answered(
    bridge: EmbeddedBridge,
) -> None:
    with _reader(bridge.endpoint) as greedy, _reader(bridge.endpoint) as other:
        for seq in range(4000):
            greedy.send_multipart(encode(Fetch("t"), seq))
        with TraceClient(bridge.endpoint) as client:
            while "TooManyRequests" not in _refused(client):
                pass
        for seq in range(8):
            other.send_multipart(encode(Fetch("t", stop=1000), seq))
        answered: set[int] = set()
        while len(answered) < 8:
            assert other.poll(60_000)
            message, seq = decode(other.recv_multipart())
            assert not isinstance(message, Error)
            answered.add(seq)
        kinds = set()
        while Error not in kinds:
            assert greedy.poll(60_000)
            message, _ = decode(greedy.recv_multipart())
            kinds.add(type(message))
        assert kinds == {FetchReply, PageRows, Error}
        assert isinstance(message, Error)
        assert "read answers first" in message.text


def _refused(client: TraceClient) -> dict[str, int]:
    from bridge.observe.status import from_json
    from bridge.wire import Observe, ObserveReply

    (reply,) = client._ask(Observe(), ObserveReply)
    return from_json(reply.document).refused
