"""What an engine can rely on: bounded memory, sent again, told in a sentence."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from numpy.typing import NDArray

from bridge.client import TraceClient
from bridge.embedded import EmbeddedBridge
from bridge.errors import BridgeUnreachable, SchemaMismatch, StoreFull, TraceError
from bridge.layout import Part, RecordLayout
from bridge.producer import RecordProducer
from bridge.store import MemoryStore, Store

NOBODY = "tcp://127.0.0.1:9"


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
        producer.hello("e", layout)


def test_the_hello_comes_first(endpoint: str) -> None:
    with (
        closing(RecordProducer(endpoint)) as producer,
        pytest.raises(TraceError, match=r"call hello\(\) first"),
    ):
        producer.send_digests("v", {})


def test_what_is_kept_for_a_silent_bridge_is_bounded(
    deaf_endpoint: str, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    payload = make_rows(Part.FORWARD, range(50))
    producer = RecordProducer(deaf_endpoint, window_bytes=20_000, deadline_s=0.3)
    with closing(producer):
        with pytest.raises(BridgeUnreachable):
            producer.hello("e", layout)
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
        producer.hello("e", layout)
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
    monkeypatch.setattr("bridge.producer._MESSAGE_BYTES", 1000)
    payload = make_rows(Part.KV, range(100))
    with RecordProducer(endpoint) as producer:
        producer.hello("e", layout)
        producer.send_rows(Part.KV, range(100), payload, "v")
        producer.send_trajectory("t", 0, range(100), range(100), "finished")
        producer.flush()
        assert producer.acknowledged_rows == 100
    with TraceClient(endpoint) as client:
        assert client.stats().messages > 6
        np.testing.assert_array_equal(client.fetch("t").kv, payload)


def test_a_full_store_is_raised_and_counted_and_does_not_block_later_calls(
    serve: Callable[[Store], str],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    payload = make_rows(Part.FORWARD, range(200))
    with closing(RecordProducer(serve(MemoryStore(10_000)))) as producer:
        producer.hello("e", layout)
        producer.send_rows(Part.FORWARD, range(100), payload[:100], "v")
        producer.flush()
        producer.send_rows(Part.FORWARD, range(200), payload, "v")
        with pytest.raises(StoreFull, match="--memory-limit"):
            producer.flush()
        assert (producer.acknowledged_rows, producer.refused_rows) == (100, 200)
        assert producer.unacknowledged_bytes == 0
        producer.send_digests("v", {"w": "00"})
        producer.flush()


def test_rows_that_do_not_fit_the_hello_are_a_schema_mismatch(
    endpoint: str, layout: RecordLayout
) -> None:
    with closing(RecordProducer(endpoint)) as producer:
        producer.hello("e", layout)
        producer.send_rows(Part.FORWARD, [0], np.zeros((1, 3), dtype=np.uint8), "v")
        with pytest.raises(SchemaMismatch, match="its hello says"):
            producer.flush()


def test_a_memory_daemon_restarted_on_the_endpoint_gets_hello_and_unacknowledged_rows(
    start_process: Callable[..., EmbeddedBridge],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    first = start_process()
    payload = make_rows(Part.FORWARD, range(6))
    with RecordProducer(first.endpoint, resend_after_s=0.5, deadline_s=120) as producer:
        producer.hello("e", layout)
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
    producer.hello("e", layout)
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
