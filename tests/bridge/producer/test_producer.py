"""What an engine can rely on: bounded memory, sent again, told in a sentence."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import BridgeUnreachable, CorruptMessage, SchemaMismatch, StoreFull, TraceError
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import Overflow, RecordProducer
from bridge.store import MemoryStore, Store
from bridge.wire import Policy

NOBODY = "tcp://127.0.0.1:9"


@pytest.fixture(params=["in messages", "in memory"], autouse=True)
def rows_travel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this holds for rows that are sent and for rows that a bridge reads (`ShmSender`)."""
    least = 1 if request.param == "in memory" else 1 << 40
    monkeypatch.setattr("bridge.producer.shm_sender._MIN_BYTES", least)


@pytest.fixture
def deaf_endpoint() -> object:
    """A socket that takes messages and never answers."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    yield socket.getsockopt_string(zmq.LAST_ENDPOINT)
    context.destroy(linger=0)


def test_a_hello_to_nobody_ends_in_a_sentence_with_the_command(layout: RecordLayout) -> None:
    with (
        closing(RecordProducer(NOBODY, deadline_s=0.3)) as producer,
        pytest.raises(BridgeUnreachable, match=f"python -m bridge serve --endpoint {NOBODY}"),
    ):
        producer.register("e", layout)


@pytest.mark.timeout(30)
def test_an_engine_whose_connection_was_given_up_says_it_all_over_a_new_one(
    endpoint: str, layout: RecordLayout
) -> None:
    """As ZeroMQ does with one that is turned away: a plain send would wait for ever."""
    with closing(RecordProducer(endpoint, resend_after_s=0.2)) as producer:
        producer._links[0]._socket.disconnect(endpoint)
        producer.register("e", layout)
    with TraceClient(endpoint) as client:
        assert client.stats().engines == 1


def test_the_hello_comes_first(endpoint: str) -> None:
    with (
        closing(RecordProducer(endpoint)) as producer,
        pytest.raises(TraceError, match=r"call register\(\) first"),
    ):
        producer.send_digests("v", {})


def test_what_is_kept_for_a_silent_bridge_is_bounded(
    deaf_endpoint: str, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    payload = make_rows(Part.FORWARD, range(50))
    producer = RecordProducer(deaf_endpoint, window_bytes=20_000, deadline_s=0.3)
    with closing(producer):
        with pytest.raises(BridgeUnreachable):
            producer.register("e", layout)
        for _ in range(20):
            with pytest.raises(BridgeUnreachable):
                producer.send_rows(Part.FORWARD, range(50), payload, "v")
        assert producer.unacknowledged_bytes <= 20_000
        with pytest.raises(BridgeUnreachable):
            producer.flush(timeout_s=0.1)


def test_buffers_can_be_reused_as_soon_as_a_call_returns(
    endpoint: str, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    original = make_rows(Part.FORWARD, range(5))
    rows, payload = torch.arange(5), torch.from_numpy(original.copy())
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, rows, payload, "v")
        producer.send_trajectory("t", 0, rows, rows, "open")
        rows.fill_(77)
        payload.fill_(77)
    with TraceClient(endpoint) as client:
        records = client.fetch("t", expect_tokens=range(5))
    np.testing.assert_array_equal(records.forward, original)


def test_large_payloads_travel_in_several_messages(
    endpoint: str,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.producer.producer.MESSAGE_BYTES", 1000)
    payload = make_rows(Part.KV, range(100))
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.KV, range(100), payload, "v")
        producer.send_trajectory("t", 0, range(100), range(100), "finished")
        producer.flush()
        assert producer.acknowledged_rows == 100
    with TraceClient(endpoint) as client:
        assert client.stats().messages > 6
        np.testing.assert_array_equal(client.fetch("t").kv, payload)


def test_a_full_store_makes_the_engine_wait_until_there_is_room_and_loses_nothing(
    serve: Callable[[Store], str],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    endpoint = serve(MemoryStore(160 << 10))
    payload = np.repeat(make_rows(Part.FORWARD, range(100)), 20, axis=0)
    with RecordProducer(endpoint, resend_after_s=0.1) as producer, TraceClient(endpoint) as trainer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(2000), payload, "v")
        producer.flush()
        producer.send_rows(Part.FORWARD, range(2000, 4000), payload, "v")
        with pytest.raises(StoreFull, match="--memory-limit"):
            producer.flush(timeout_s=3.0)
        assert producer.acknowledged_rows == 2000
        assert trainer.stats().full
        trainer.begin_step(1)
        assert trainer.gc(Policy(keep=1)).rows == 2000
        producer.flush()
        assert (producer.acknowledged_rows, producer.unacknowledged_bytes) == (4000, 0)
        assert not trainer.stats().full


def test_an_engine_that_waits_for_a_full_store_is_told_so_at_its_deadline(
    serve: Callable[[Store], str],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    endpoint = serve(MemoryStore(160 << 10))
    payload = np.repeat(make_rows(Part.FORWARD, range(100)), 20, axis=0)
    with (
        closing(
            RecordProducer(
                endpoint, resend_after_s=0.1, deadline_s=1.5, window_bytes=payload.nbytes
            )
        ) as producer,
        TraceClient(endpoint) as trainer,
    ):
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(2000), payload, "v")
        producer.flush()
        producer.send_rows(Part.FORWARD, range(2000, 4000), payload, "v")
        with pytest.raises(StoreFull, match=r"took nothing for .* s because it is full"):
            producer.send_rows(Part.FORWARD, range(4000, 6000), payload, "v")
        with pytest.raises(StoreFull):
            producer.flush()
        with pytest.raises(StoreFull):
            producer.poll()
        trainer.begin_step(1)
        trainer.gc(Policy(keep=1))
        while producer.unacknowledged_bytes:  # every call tries again, also those that raise
            with suppress(StoreFull, BridgeUnreachable):
                producer.poll()
        assert producer.acknowledged_rows == 4000


def test_an_engine_that_may_drop_does_not_wait_for_a_full_store_for_ever(
    serve: Callable[[Store], str],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    endpoint = serve(MemoryStore(160 << 10))
    payload = np.repeat(make_rows(Part.FORWARD, range(100)), 20, axis=0)
    with closing(
        RecordProducer(endpoint, resend_after_s=0.1, deadline_s=0.5, overflow=Overflow.DROP)
    ) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(2000), payload, "v")
        producer.flush()
        long = range(1 << 16)
        producer.send_trajectory("more than memory holds", 0, long, long, "finished")
        with pytest.raises(StoreFull, match="because it is full"):
            producer.flush()


def test_an_engine_that_may_drop_goes_on_and_says_how_many_rows_are_missing(
    serve: Callable[[Store], str],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    endpoint = serve(MemoryStore(216 << 10))
    payload = np.repeat(make_rows(Part.FORWARD, range(100)), 20, axis=0)
    with RecordProducer(endpoint, overflow=Overflow.DROP) as producer:
        producer.register("e", layout)
        producer.send_trajectory("t", 0, range(4000), range(4000), "finished")
        for first in (0, 2000):
            rows = range(first, first + 2000)
            producer.send_rows(Part.FORWARD, rows, payload, "v")
        producer.flush()
        assert producer.dropped_rows == {Part.FORWARD: 2000}
    with TraceClient(endpoint) as trainer:
        assert trainer.stats().dropped_rows == 2000
        assert trainer.fetch("t").forward_valid.tolist() == [True] * 2000 + [False] * 2000


def test_what_an_engine_that_may_drop_keeps_for_a_stalled_bridge_is_bounded(
    start_process: Callable[..., EmbeddedBridge],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    bridge = start_process()
    payload = make_rows(Part.FORWARD, range(50))
    window = 20_000
    with RecordProducer(
        bridge.endpoint, window_bytes=window, overflow=Overflow.DROP, resend_after_s=0.3
    ) as producer:
        producer.register("e", layout)
        os.kill(bridge.process.pid, signal.SIGSTOP)
        for first in range(0, 50_000, 50):
            producer.send_rows(Part.FORWARD, range(first, first + 50), payload, "v")
            producer.send_trajectory(f"t{first}", 0, range(50), range(50), "finished")
            assert producer.unacknowledged_bytes <= window * 5 // 4 + 1000
        dropped = producer.dropped_rows[Part.FORWARD]
        assert 0 < dropped < 50_000
        os.kill(bridge.process.pid, signal.SIGCONT)
        producer.flush()
        assert producer.acknowledged_rows == 50_000 - dropped
        with TraceClient(bridge.endpoint) as trainer:
            assert trainer.stats().dropped_rows == dropped


def test_rows_that_do_not_fit_the_hello_are_a_schema_mismatch(
    endpoint: str, layout: RecordLayout
) -> None:
    with closing(RecordProducer(endpoint)) as producer:
        producer.register("e", layout)

        def send() -> None:
            """A quick answer is raised by the first of these, a slow one by the second."""
            producer.send_rows(Part.FORWARD, [0], np.zeros((1, 3), dtype=np.uint8), "v")
            producer.flush()

        with pytest.raises(SchemaMismatch, match="its Hello says"):
            send()


def test_what_the_bridge_cannot_accept_is_told_once_and_not_sent_again(
    endpoint: str, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    payload = make_rows(Part.FORWARD, [0])
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)

        def send() -> None:
            producer.send_rows(Part.FORWARD, [-5], payload, "v")
            producer.flush()

        with pytest.raises(CorruptMessage, match="a row number is negative"):
            send()
        producer.send_rows(Part.FORWARD, [0], payload, "v")
        producer.flush()
        assert producer.acknowledged_rows == 1


def test_a_memory_daemon_restarted_on_the_endpoint_gets_hello_and_unacknowledged_rows(
    start_process: Callable[..., EmbeddedBridge],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    first = start_process()
    payload = make_rows(Part.FORWARD, range(6))
    with RecordProducer(first.endpoint, resend_after_s=0.5, deadline_s=120) as producer:
        producer.register("e", layout)
        os.kill(first.process.pid, signal.SIGINT)  # as Ctrl-C does
        assert first.process.wait(30) == 0
        producer.send_rows(Part.FORWARD, range(6), payload, "v")
        start_process(endpoint=first.endpoint)
        producer.send_trajectory("t", 0, range(6), range(6), "finished")
        producer.flush()
        with TraceClient(first.endpoint) as client:
            np.testing.assert_array_equal(client.fetch("t").forward, payload)


def test_no_acknowledged_row_is_lost_and_no_wrong_row_served_when_the_daemon_is_killed(
    tmp_path: Path,
    start_process: Callable[..., EmbeddedBridge],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    """kill -9 in the middle of a stream, twice: once the engine dies with it, once it goes on."""
    payload = make_rows(Part.FORWARD, range(6000))
    bridge = start_process(tmp_path)
    producer = RecordProducer(bridge.endpoint, resend_after_s=0.5, deadline_s=120)
    producer.register("e", layout)
    producer.send_trajectory("t", 0, range(6000), range(6000), "open")
    _kill_during_stream(bridge, producer, payload, range(0, 3000, 2))
    acknowledged = producer.acknowledged_rows
    assert acknowledged >= 50

    bridge = start_process(tmp_path, endpoint=bridge.endpoint)
    with TraceClient(bridge.endpoint) as client:
        records = client.fetch("t")
    held = records.forward_valid.numpy()
    assert held[:acknowledged].all()
    np.testing.assert_array_equal(records.forward[held], payload[held])

    _kill_during_stream(bridge, producer, payload, range(3000, 6000, 2))
    bridge = start_process(tmp_path, endpoint=bridge.endpoint)
    producer.flush()
    producer.close()
    with TraceClient(bridge.endpoint) as client:
        records = client.fetch("t")
    assert records.forward_valid.all()
    np.testing.assert_array_equal(records.forward, payload)


def _kill_during_stream(
    bridge: EmbeddedBridge, producer: RecordProducer, payload: NDArray[np.uint8], begins: range
) -> None:
    """Stream rows; kill the daemon once some are acknowledged, with many more on their way."""
    enough = producer.acknowledged_rows + 50
    for begin in begins:
        rows = slice(begin, begin + begins.step)
        numbers = range(rows.start, rows.stop)
        producer.send_rows(Part.FORWARD, numbers, payload[rows], "v")
        if producer.acknowledged_rows >= enough:
            bridge.process.kill()
    while producer.acknowledged_rows < enough:
        producer.poll()
    bridge.process.kill()
    bridge.process.wait()
    producer.poll()
