"""Rows that a daemon writes into a client's memory are the right ones or none, come what may."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.client import connection as connection_module
from bridge.client.client import TraceClient
from bridge.client.connection import Connection
from bridge.client.records import TrajectoryRecords
from bridge.daemon.memory import shared_memory
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import BridgeUnreachable, CorruptMessage
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.store import MemoryStore
from bridge.transport.shared_memory import BUFFERS, STAMP_BYTES, ShmSegment
from bridge.transport.sockets import queue_for_sending
from bridge.wire import BufferHandle, Fetch, FetchReply, PageRows, Ping, Pong, ShmPageRows
from tests.bridge.daemon.test_daemon import Peer
from tests.faults import engine
from tests.faults.expected import Expected
from tests.faults.verifier import compare

_ROWS = 60
MakeRows = Callable[..., NDArray[np.uint8]]


@pytest.fixture
def producer(endpoint: str, layout: RecordLayout) -> Iterator[RecordProducer]:
    """Trajectory "t": positions 0..59 are rows 0..59 with tokens alike."""
    with RecordProducer(endpoint) as connected:
        connected.register("e", layout)
        yield connected


@pytest.fixture
def payload(producer: RecordProducer, make_rows: MakeRows) -> dict[Part, NDArray[np.uint8]]:
    made = {part: make_rows(part, range(2 * _ROWS)) for part in Part}
    for part, rows in made.items():
        producer.send_rows(part, range(2 * _ROWS), rows, "v")
    _tell(producer, 0)
    return made


def _tell(producer: RecordProducer, first: int) -> None:
    """Tell "t" as rows from ``first`` on; the tokens say which they are."""
    rows = range(first, first + _ROWS)
    producer.send_trajectory("t", 0, rows, rows, "open")
    producer.flush()


def _assert_right(records: TrajectoryRecords, payload: dict[Part, NDArray[np.uint8]]) -> None:
    """The rows are those that the tokens say, so that a mixture of two tellings is found."""
    rows = records.rows.numpy()
    assert records.tokens.tolist() == rows.tolist()
    assert rows.tolist() in ([*range(_ROWS)], [*range(_ROWS, 2 * _ROWS)])
    for part, found, valid in (
        (Part.FORWARD, records.forward, records.forward_valid),
        (Part.KV, records.kv, records.kv_valid),
    ):
        assert valid.all()
        np.testing.assert_array_equal(found, payload[part][rows])


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kinds of the messages that brought rows."""
    kinds: list[type] = []
    told = Connection._next

    def watched(self: Connection, *arguments: Any) -> Any:
        reply = told(self, *arguments)
        if isinstance(reply, PageRows | ShmPageRows):
            kinds.append(type(reply))
        return reply

    monkeypatch.setattr(Connection, "_next", watched)
    return kinds


@pytest.mark.parametrize("more", [-1, 0, 1, 31, 32, 33])
@pytest.mark.parametrize("rows", [1, 2, 7, _ROWS])
def test_a_place_of_any_size_serves_and_one_smaller_than_a_row_is_passed_over(
    endpoint: str,
    payload: dict[Part, NDArray[np.uint8]],
    layout: RecordLayout,
    arrived: list[type],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    more: int,
) -> None:
    nbytes = rows * layout.bytes_per_token() + more
    monkeypatch.setattr(
        "bridge.client.shm_receiver.ShmSegment", lambda: ShmSegment(BUFFERS, nbytes)
    )
    monkeypatch.setattr("bridge.daemon.fetch.gather.CHUNK_BYTES", 300)
    with TraceClient(endpoint) as client:
        _assert_right(client.fetch("t"), payload)
    assert set(arrived) == {PageRows if nbytes < layout.bytes_per_token() else ShmPageRows}


@pytest.mark.usefixtures("producer")
def test_a_bridge_that_cannot_reach_the_memory_answers_through_the_socket(
    endpoint: str,
    payload: dict[Part, NDArray[np.uint8]],
    arrived: list[type],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "opened", lambda _: None)
    with TraceClient(endpoint) as client:
        _assert_right(client.fetch("t"), payload)
        _assert_right(client.fetch("t"), payload)
    assert set(arrived) == {PageRows}


def _held() -> int:
    """Descriptors of this process that are such memory, those of its daemon too."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += "memfd:sglang-trace" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def test_places_and_descriptors_come_back_however_an_answer_ends(
    endpoint: str,
    payload: dict[Part, NDArray[np.uint8]],
    arrived: list[type],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A record that pytest keeps of a refusal holds the error and with it the daemon's frames.
    caplog.set_level(logging.CRITICAL, logger="bridge.daemon.server")
    before = _held()
    with TraceClient(endpoint) as client:
        for _ in range(2 * BUFFERS):
            _assert_right(client.fetch("t"), payload)
            assert list(client.fetch_all(["nope"] * 3, allow_unknown=True)) == [None] * 3
            given_up = client.fetch_all(["t"] * 4)
            next(given_up)
            given_up.close()  # type: ignore[attr-defined]
    assert set(arrived) == {ShmPageRows}
    assert _held() <= before + 1  # the daemon's, until it has been idle


@pytest.mark.parametrize("told_anew", [False, True], ids=["same rows", "other rows"])
def test_a_question_that_is_asked_twice_while_its_answer_is_copied(
    endpoint: str,
    producer: RecordProducer,
    payload: dict[Part, NDArray[np.uint8]],
    monkeypatch: pytest.MonkeyPatch,
    told_anew: bool,
) -> None:
    """The second answer does not go where the first one is read: the client has the right rows."""
    asked: list[list[bytes]] = []

    def noting(socket: Any, frames: Any) -> None:
        asked.append([bytes(frame) for frame in frames])
        queue_for_sending(socket, frames)

    monkeypatch.setattr(connection_module, "queue_for_sending", noting)
    end = time.monotonic() + 30
    with closing(Connection(endpoint)) as reader:
        seq = reader.send(Fetch("t"))
        (question,) = asked
        reader.receive(seq, FetchReply, end)

        def read_while_it_is_asked_again() -> NDArray[np.uint8]:
            with reader.rows(seq, end) as piece:
                copied = piece.rows.copy()
                if told_anew:
                    _tell(producer, _ROWS)
                queue_for_sending(reader._socket, question)
                reader.ask(Ping(), Pong, end)  # answered when the second answer is written
                return copied

        copied = read_while_it_is_asked_again()
        np.testing.assert_array_equal(copied, payload[Part.FORWARD][:_ROWS])
        reader.cancel([seq])
    with TraceClient(endpoint) as client:
        _assert_right(client.fetch("t"), payload)


@pytest.mark.parametrize("seed", range(4))
def test_questions_that_come_again_at_any_time_never_yield_wrong_rows(
    endpoint: str,
    producer: RecordProducer,
    payload: dict[Part, NDArray[np.uint8]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Also those whose buffers belong to other answers by then."""
    rng = np.random.default_rng(seed)
    asked: list[list[bytes]] = []

    def again(socket: Any, frames: Any) -> None:
        asked.append([bytes(frame) for frame in frames])
        queue_for_sending(socket, frames)
        for _ in range(int(rng.integers(0, 3))):
            last = asked[-8:]
            queue_for_sending(socket, last[int(rng.integers(len(last)))])

    monkeypatch.setattr("bridge.client.shm_receiver.ShmSegment", lambda: ShmSegment(BUFFERS, 2500))
    monkeypatch.setattr("bridge.daemon.fetch.gather.CHUNK_BYTES", 700)
    monkeypatch.setattr(connection_module, "queue_for_sending", again)
    right = 0
    with TraceClient(endpoint) as client:
        for turn in range(60):
            if turn % 10 == 5:
                _tell(producer, _ROWS * int(rng.integers(0, 2)))
            try:
                found = list(client.fetch_all(["t", "t", "t"]))
            except CorruptMessage:
                continue
            for records in found:
                assert records is not None
                _assert_right(records, payload)
                right += 1
    assert right


def test_a_place_that_is_none_is_answered_through_the_socket_and_ends_nothing(
    endpoint: str, payload: dict[Part, NDArray[np.uint8]]
) -> None:
    """A stranger may also name what overlaps, or the key: it is that client's own memory."""
    assert payload
    with closing(ShmSegment(2, 1 << 14)) as segment, closing(Peer(endpoint)) as peer:
        buffer = segment.acquire()
        assert buffer is not None
        told = [
            (buffer.offset - 7, 5000, buffer.key, ShmPageRows),
            (0, 5000, buffer.key, ShmPageRows),
            (buffer.offset, 1 << 20, buffer.key, PageRows),
            (buffer.offset, 5000, "é" * 32, PageRows),
            (buffer.offset, 5000, "0" * 32, PageRows),
        ]
        for seq, (offset, nbytes, key, kind) in enumerate(told):
            fetch = Fetch("t", buffer=BufferHandle(buffer.pid, buffer.fd, key, offset, nbytes))
            assert isinstance(peer.ask(fetch, seq), FetchReply)
            for _ in Part:
                answer, answered = peer.hear()
                assert (type(answer), answered) == (kind, seq)
        assert not any(segment.memory(buffer)[STAMP_BYTES + 5000 :])


def _fetch_until_the_bridge_is_gone(
    client: TraceClient, pages: Expected, timeout_s: float | None = None
) -> None:
    """Fetch right answers until there are none."""
    with suppress(BridgeUnreachable):
        for _ in range(200):
            for records in client.fetch_all([pages.whole] * 3, timeout_s=timeout_s):
                assert records is not None
                assert compare(records, pages) == (2 * pages.rows, 0)
        pytest.fail("the bridge was never gone")


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_daemon_that_is_killed_while_it_writes_leaves_right_rows_or_none_and_the_next_one_serves(
    start_process: Callable[..., EmbeddedBridge], tmp_path: Path, on_disk: bool
) -> None:
    pages = Expected("pages", 8_000)  # 15 MB: two pages
    directory = tmp_path if on_disk else None
    bridge = start_process(directory)
    engine.fill(bridge.endpoint, pages)
    with TraceClient(bridge.endpoint, timeout_s=2.0) as client:
        assert compare(client.fetch(pages.whole), pages) == (2 * pages.rows, 0)
        for delay_s in (0.0, 0.05):
            killing = threading.Timer(delay_s, bridge.process.kill)
            killing.start()
            _fetch_until_the_bridge_is_gone(client, pages)
            killing.join()
            bridge.process.wait()
            bridge = start_process(directory, endpoint=bridge.endpoint)
            if not on_disk:
                engine.fill(bridge.endpoint, pages)
            records = client.fetch(pages.whole, timeout_s=30.0)
            assert compare(records, pages) == (2 * pages.rows, 0)


def test_a_daemon_that_is_stopped_while_it_writes_and_goes_on_later_harms_no_later_answer(
    start_process: Callable[..., EmbeddedBridge],
) -> None:
    """What it writes then is in memory that nothing else uses."""

    pages = Expected("pages", 8_000)
    bridge = start_process()
    engine.fill(bridge.endpoint, pages)
    with TraceClient(bridge.endpoint) as client:
        for delay_s in (0.002, 0.03):
            stopping = threading.Timer(delay_s, os.kill, (bridge.process.pid, signal.SIGSTOP))
            stopping.start()
            try:
                _fetch_until_the_bridge_is_gone(client, pages, timeout_s=0.3)
            finally:
                stopping.join()
                os.kill(bridge.process.pid, signal.SIGCONT)
            for records in client.fetch_all([pages.whole] * 3):
                assert records is not None
                assert compare(records, pages) == (2 * pages.rows, 0)


_FETCH_ON = """
import sys
from bridge.client.client import TraceClient
with TraceClient(sys.argv[1]) as client:
    while True:
        assert client.fetch("t").forward_valid.all()
        print("fetched", flush=True)
"""


def test_the_memory_of_a_client_that_is_killed_is_let_go_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[..., str],
    layout: RecordLayout,
    make_rows: MakeRows,
) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:sglang-trace ")

    monkeypatch.setattr(shared_memory, "_IDLE_S", 0.3)
    endpoint = serve(MemoryStore(64 << 20))
    rows = make_rows(Part.FORWARD, range(20))
    before = mapped()
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(20), rows, "v")
        producer.send_trajectory("t", 0, range(20), range(20), "finished")
    killed = subprocess.Popen([sys.executable, "-c", _FETCH_ON, endpoint], stdout=subprocess.PIPE)
    with killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"fetched\n"
        assert mapped() == before + 1
        killed.kill()
    end = time.monotonic() + 30
    while mapped() > before:
        assert time.monotonic() < end
        time.sleep(0.02)
    with TraceClient(endpoint) as client:
        np.testing.assert_array_equal(client.fetch("t").forward, rows)
