"""Rows in an engine's memory arrive as they were put there, or are sent themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.daemon.memory.shared_memory import ShmSegments
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import CorruptMessage, ShmUnreachable
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.producer.shm_sender import ShmSender
from bridge.transport.shared_memory import STAMP_BYTES
from bridge.wire import Rows, RowsInShm
from bridge.wire.envelope import Buffer

BUFFER = 512 << 10
WINDOW = 8 * BUFFER
PEER = b"engine"


def rows_of(nbytes: int, salt: int = 0) -> Rows:
    """A message of one row."""
    payload = np.random.default_rng(salt).integers(0, 256, (1, nbytes), dtype=np.uint8)
    return Rows.of("e", Part.KV, np.array([salt]), payload, "v")


@pytest.fixture
def sender() -> Iterator[ShmSender]:
    with closing(ShmSender(WINDOW, BUFFER)) as sender:
        yield sender


def in_shm(sender: ShmSender, rows: Rows) -> RowsInShm:
    found = sender.put(rows)
    assert found is not None
    return found


def test_the_bridge_reads_what_was_put(sender: ShmSender) -> None:
    segments = ShmSegments()
    for salt in range(10):
        rows = rows_of(BUFFER - salt, salt)
        message = in_shm(sender, rows)
        read = segments.rows(PEER, message)
        np.testing.assert_array_equal(read.payload, rows.payload)
        assert read.header == message.header
        sender.release(message)


def test_what_was_read_stays_when_the_place_is_used_again(sender: ShmSender) -> None:
    first = in_shm(sender, rows_of(BUFFER, 1))
    read = ShmSegments().rows(PEER, first)
    sender.release(first)
    in_shm(sender, rows_of(BUFFER, 2))
    np.testing.assert_array_equal(read.payload, rows_of(BUFFER, 1).payload)


@pytest.mark.parametrize("nbytes", [1000, BUFFER + 1])
def test_small_and_oversized_messages_travel_themselves(sender: ShmSender, nbytes: int) -> None:
    assert sender.put(rows_of(nbytes)) is None


def filled(sender: ShmSender, nbytes: int) -> list[RowsInShm]:
    """Put messages until there is no buffer left."""
    return list(iter(lambda: sender.put(rows_of(nbytes)), None))


@pytest.mark.parametrize("nbytes", [256 << 10, 300_000, BUFFER])
def test_messages_of_any_size_use_most_of_the_window(sender: ShmSender, nbytes: int) -> None:
    assert len(filled(sender, nbytes)) * nbytes >= WINDOW


def test_a_place_is_used_again_when_its_neighbours_are_answered_too(sender: ShmSender) -> None:
    first, *others = filled(sender, BUFFER)
    sender.release(first)
    assert sender.put(rows_of(BUFFER)) is None
    for message in others[:3]:
        sender.release(message)
    assert in_shm(sender, rows_of(BUFFER)).buffer == first.buffer


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_no_place_is_lent_twice_and_late_copies_are_found_out(steps: list[int]) -> None:
    """A step puts a message of one of a few sizes, or takes one of those back that wait."""
    segments, waiting, answered = ShmSegments(), list[tuple[RowsInShm, Rows]](), list[RowsInShm]()
    with closing(ShmSender(WINDOW, BUFFER)) as sender:
        for salt, step in enumerate(steps):
            if step > 7 and waiting:
                message, _ = waiting.pop(step % len(waiting))
                sender.release(message)
                answered.append(message)
                continue
            rows = rows_of((256 << 10) + step * 37_449, salt)
            message = sender.put(rows)
            if message is not None:
                waiting.append((message, rows))
                overwritten = [late for late in answered if overlap(late, message)]
                for late in overwritten:
                    with pytest.raises(CorruptMessage, match="another stamp"):
                        segments.rows(PEER, late)
        for message, rows in waiting:
            np.testing.assert_array_equal(segments.rows(PEER, message).payload, rows.payload)


def test_late_copies_are_found_out_before_anything_else_is_written(sender: ShmSender) -> None:
    """So that nobody who reads while the next messages are written finds an old stamp."""
    messages = filled(sender, 300_000)
    for message in messages:
        sender.release(message)
    for message in messages:
        with pytest.raises(CorruptMessage, match="another stamp"):
            ShmSegments().rows(PEER, message)


def overlap(one: RowsInShm, other: RowsInShm) -> bool:
    """Whether two messages have a byte in common, one of rows or of the stamp."""
    first, last = sorted((one.buffer, other.buffer), key=lambda buffer: buffer.offset)
    return last.offset < first.offset + STAMP_BYTES + first.nbytes


def test_when_memory_is_out_of_reach_no_more_is_lent(sender: ShmSender) -> None:
    message = in_shm(sender, rows_of(BUFFER, 1))
    sender.stop()
    assert sender.put(rows_of(BUFFER, 2)) is None
    np.testing.assert_array_equal(sender.reclaim(message).payload, rows_of(BUFFER, 1).payload)


def test_a_copy_that_comes_when_the_place_is_used_again_is_found_out(sender: ShmSender) -> None:
    first = in_shm(sender, rows_of(BUFFER, 1))
    sender.release(first)
    in_shm(sender, rows_of(BUFFER, 2))
    with pytest.raises(CorruptMessage, match="another stamp"):
        ShmSegments().rows(PEER, first)


def test_memory_of_a_process_that_is_gone_is_out_of_reach(sender: ShmSender) -> None:
    message = in_shm(sender, rows_of(BUFFER))
    gone = msgspec.structs.replace(message, buffer=replace(message.buffer, pid=(1 << 22) + 1))
    with pytest.raises(ShmUnreachable, match="send the rows through the socket"):
        ShmSegments().rows(PEER, gone)


# --- with a bridge


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lend small messages too; how many frames every message that is sent has, and its kind."""
    monkeypatch.setattr("bridge.producer.shm_sender._MIN_BYTES", 1)
    kinds: list[str] = []

    def noting(message: Rows, seq: int) -> list[Buffer]:
        kinds.append(message.KIND)
        return encode(message, seq)

    from bridge.wire import encode

    monkeypatch.setattr("bridge.producer.link.encode", noting)
    return kinds


def stream(
    endpoint: str, layout: RecordLayout, payload: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], int]:
    """Send rows in many messages; return what a trainer reads and how many were acknowledged."""
    count = len(payload)
    with RecordProducer(endpoint, resend_after_s=0.5) as producer:
        producer.register("e", layout)
        for begin in range(0, count, 10):
            numbers = range(begin, begin + 10)
            producer.send_rows(Part.FORWARD, numbers, payload[begin : begin + 10], "v")
        producer.send_trajectory("t", 0, range(count), range(count), "finished")
        producer.flush()
        acknowledged = producer.acknowledged_rows
    with TraceClient(endpoint) as client:
        return client.fetch("t").forward.numpy(), acknowledged


def test_rows_reach_a_bridge_of_this_machine_through_memory(
    endpoint: str,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    sent: list[str],
) -> None:
    payload = make_rows(Part.FORWARD, range(400))
    read, acknowledged = stream(endpoint, layout, payload)
    np.testing.assert_array_equal(read, payload)
    assert acknowledged == 400
    assert sent.count("rows_in_shm") == 40


def test_a_bridge_that_cannot_reach_the_memory_gets_the_rows_themselves(
    endpoint: str,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    sent: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.daemon.memory.shared_memory.opened", lambda buffer: None)
    payload = make_rows(Part.FORWARD, range(400))
    read, acknowledged = stream(endpoint, layout, payload)
    np.testing.assert_array_equal(read, payload)
    assert acknowledged == 400
    assert "rows" in sent


def test_rows_that_are_damaged_in_memory_are_sent_themselves(
    endpoint: str,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    sent: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, damaged = ShmSender.put, list[bool]()

    def damaging(self: ShmSender, rows: Rows) -> RowsInShm | None:
        in_shm = put(self, rows)
        if in_shm is None or damaged:
            return in_shm
        damaged.append(True)
        return RowsInShm(in_shm.header, in_shm.buffer, in_shm.stamp ^ 1)

    monkeypatch.setattr(ShmSender, "put", damaging)
    payload = make_rows(Part.FORWARD, range(400))
    read, acknowledged = stream(endpoint, layout, payload)
    np.testing.assert_array_equal(read, payload)
    assert acknowledged == 400
    assert damaged == [True]


def test_a_late_copy_of_a_message_that_was_answered_changes_nothing(
    endpoint: str,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.producer.shm_sender._MIN_BYTES", 1)
    first, second = (make_rows(Part.FORWARD, range(20 * n, 20 * n + 20)) for n in range(2))
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        link, kept = producer._links[0], []
        keep = link._keep_and_send
        monkeypatch.setattr(link, "_keep_and_send", lambda each: (kept.append(each), keep(each)))
        producer.send_rows(Part.FORWARD, range(20), first, "v")
        frames = [bytes(frame) for frame in kept[0].frames]
        producer.flush()
        producer.send_rows(Part.FORWARD, range(20, 40), second, "v")
        producer._links[0]._socket.send_multipart(frames)
        producer.send_trajectory("t", 0, range(40), range(40), "finished")
        producer.flush()
        assert producer.acknowledged_rows == 40
    with TraceClient(endpoint) as client:
        read = client.fetch("t").forward.numpy()
    np.testing.assert_array_equal(read, np.concatenate([first, second]))


def test_the_memory_is_the_engines_own_and_goes_with_it(
    start_process: Callable[..., EmbeddedBridge], layout: RecordLayout
) -> None:
    producer = RecordProducer(start_process().endpoint)
    producer.register("e", layout)
    width = layout.row_bytes(Part.FORWARD)
    count = (1 << 20) // width
    before = memory_files()
    producer.send_rows(Part.FORWARD, range(count), np.zeros((count, width), np.uint8), "v")
    producer.flush()
    assert memory_files() > before
    producer.close()
    assert memory_files() == before


def memory_files() -> int:
    """Open descriptors of this process that are memory without a name."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them is gone
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:sglang-trace" in link for link in links)
