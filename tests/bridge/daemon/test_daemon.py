"""The daemon under well-meaning, confused and hostile peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.daemon import Daemon
from bridge.layout import Part, RecordLayout
from bridge.store import MemoryStore, Store
from bridge.transport.endpoints import EndpointInUse, InvalidEndpoint
from bridge.wire import (
    SCHEMA_VERSION,
    Ack,
    Error,
    Hello,
    Message,
    Ping,
    Pong,
    Rows,
    Trajectory,
    TrajectoryState,
    decode,
    encode,
)


class Peer:
    """A bare socket that says what it likes."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def say(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def hear(self) -> tuple[Message, int]:
        assert self._socket.poll(10_000), "no answer in 10 s"
        return decode(self._socket.recv_multipart())

    def ask(self, message: Message, seq: int) -> Message:
        self._socket.send_multipart(encode(message, seq))
        answer, answered = self.hear()
        assert answered == seq
        return answer

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def peer(endpoint: str) -> Iterator[Peer]:
    with closing(Peer(endpoint)) as connected:
        yield connected


def _rows(payload: NDArray[np.uint8], first: int = 0, engine: str = "e") -> Rows:
    numbers = np.arange(first, first + len(payload))
    return Rows.of(engine, Part.FORWARD, numbers, payload, "v")


def test_records_before_a_hello_are_refused_and_welcome_after_it(
    peer: Peer, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    rows = _rows(make_rows(Part.FORWARD, range(3)))
    refused = peer.ask(rows, 1)
    assert isinstance(refused, Error)
    assert refused.code == "UnknownEngine"
    assert peer.ask(Hello("e", layout), 0) == Ack((0,))
    assert peer.ask(rows, 1) == Ack((1,))


def test_rows_of_another_width_and_a_changed_hello_are_refused(
    peer: Peer, layout: RecordLayout
) -> None:
    peer.ask(Hello("e", layout), 0)
    refused = peer.ask(_rows(np.zeros((2, 5), dtype=np.uint8)), 1)
    assert isinstance(refused, Error)
    assert refused.code == "SchemaMismatch"
    refused = peer.ask(Hello("e", layout.narrow(sites=["fc1"])), 2)
    assert isinstance(refused, Error)
    assert "new engine id" in refused.text


def test_a_message_sent_again_is_acknowledged_and_stored_once(
    endpoint: str,
    peer: Peer,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    peer.ask(Hello("e", layout), 0)
    frames = [bytes(frame) for frame in encode(_rows(make_rows(Part.FORWARD, range(3))), 1)]
    for _ in range(5):
        peer.say(frames)
    acknowledged: list[int] = []
    while len(acknowledged) < 5:
        answer, _ = peer.hear()
        assert isinstance(answer, Ack)
        acknowledged += answer.seqs
    assert acknowledged == [1] * 5
    with TraceClient(endpoint) as client:
        stats = client.stats()
    assert (stats.messages, stats.duplicates, stats.forward_rows) == (2, 4, 3)


def test_a_row_sent_again_under_another_sequence_number_is_the_same_row(
    endpoint: str,
    peer: Peer,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    payload = make_rows(Part.FORWARD, range(4))
    peer.ask(Hello("e", layout), 0)
    peer.ask(_rows(payload[:3]), 1)
    peer.ask(_rows(payload[1:], first=1), 2)
    peer.ask(
        Trajectory("e", "t", 0, np.arange(4), np.arange(4), TrajectoryState.FINISHED),
        3,
    )
    with TraceClient(endpoint) as client:
        assert client.stats().forward_rows == 4
        np.testing.assert_array_equal(client.fetch("t").forward, payload)


def test_a_full_store_refuses_what_does_not_fit_and_keeps_what_does(
    serve: Callable[[Store], str],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    payload = np.repeat(make_rows(Part.FORWARD, range(400)), 10, axis=0)
    with closing(Peer(serve(MemoryStore(64 << 10)))) as peer:
        peer.ask(Hello("e", layout), 0)
        for seq, (first, last) in enumerate(((0, 100), (0, len(payload)), (100, 110)), start=1):
            part = _rows(payload[first:last], first)
            peer.say([bytes(frame) for frame in encode(part, seq)])
        acknowledged, refused = [], {}
        while len(acknowledged) + len(refused) < 3:
            answer, seq = peer.hear()
            if isinstance(answer, Ack):
                acknowledged += answer.seqs
            else:
                refused[seq] = answer
    assert acknowledged == [1, 3]
    assert isinstance(refused[2], Error)
    assert refused[2].code == "StoreFull"


def test_answers_and_journal_entries_are_not_for_the_daemon(
    peer: Peer, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    for message in (Ack((1,)), Pong(), _rows(make_rows(Part.FORWARD, [0])).header):
        refused = peer.ask(message, 1)
        assert isinstance(refused, Error)
        assert refused.code == "CorruptMessage"


def test_another_schema_version_is_answered_in_a_sentence(peer: Peer) -> None:
    head = bytearray(encode(Ping(), 1)[0])
    head[4:6] = (SCHEMA_VERSION + 1).to_bytes(2, "little")
    peer.say([bytes(head)])
    answer, _ = peer.hear()
    assert isinstance(answer, Error)
    assert answer.code == "SchemaMismatch"
    assert "same sglang-trace version" in answer.text


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=64), min_size=1, max_size=20))
def test_noise_is_refused_and_the_daemon_serves_on(peer: Peer, frames: list[bytes]) -> None:
    peer.say(frames)
    answer, _ = peer.hear()
    assert isinstance(answer, Error)
    assert peer.ask(Ping(), 7) == Pong()


def test_an_occupied_port_is_named(endpoint: str) -> None:
    with pytest.raises(EndpointInUse, match=rf"cannot listen on {endpoint} .*another port"):
        Daemon(endpoint, MemoryStore(1000))


@pytest.mark.parametrize(
    "refused",
    [
        "tcp://0.0.0.0:5601",
        "tcp://10.0.0.1:5601",
        "tcp://*:5601",
        "tcp://example.com:5601",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:70000",
        "ipc:///x",
        "",
    ],
)
def test_only_loopback_endpoints_are_served(refused: str) -> None:
    with pytest.raises(InvalidEndpoint, match=r"tcp://127\.0\.0\.1:"):
        Daemon(refused, MemoryStore(1000))


@pytest.mark.parametrize("asked", ["tcp://127.0.0.1:0", "tcp://localhost:*", "tcp://127.0.0.1:*"])
def test_port_0_becomes_a_real_port(asked: str) -> None:
    daemon = Daemon(asked, MemoryStore(1000))
    assert int(daemon.endpoint.rpartition(":")[2]) > 0
    daemon.close()
