"""The engine's side of the fault table: a process that streams what it is expected to record."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.errors import StoreFull, TraceError
from bridge.layout import Part
from bridge.producer import shm_sender
from bridge.producer.link import BridgeLink, LinkOptions, _Unacknowledged
from bridge.producer.producer import Overflow, RecordProducer
from bridge.producer.shm_sender import ShmSender
from bridge.wire import Ack, TrajectoryState, decode
from tests.faults.expected import LAYOUT, Expected
from tests.faults.journal import Journal, Promises, read

_PLACES, _LOCATION_BYTES = 3, 512 << 10
_FILLED_ROWS = 16  # of one message
_TELL_EVERY = 6  # messages of rows between two of the trajectories


@dataclass(frozen=True, slots=True)
class Stream:
    """What an engine sends where.

    It rests ``rest_s`` after its hello and ``pace_s`` after each message of at most ``most_rows``.
    """

    endpoint: str
    expected: Expected
    journal: Path
    seed: int
    rest_s: float = 0.0
    pace_s: float = 0.001
    most_rows: int = 16
    window_bytes: int = 96 << 10
    resend_after_s: float = 0.3
    deadline_s: float = 120.0
    overflow: Overflow = Overflow.BLOCK
    flush_s: float | None = None

    def promises(self, sent_after: str | None = None) -> Promises:
        """Read the journal as it is now."""
        return read(self.journal, self.expected.rows, sent_after=sent_after)


class WitnessedLink(BridgeLink):
    """Writes down what is sent and what is acknowledged, each before it has any effect.

    Of every four seeds in a row two send rows through shared memory as long as there is a buffer.
    """

    def __init__(self, endpoint: str, stream: Stream, options: LinkOptions) -> None:
        self._journal = Journal(stream.journal)
        super().__init__(endpoint, None, options)
        self._shm_sender = (
            ShmSender(_PLACES * _LOCATION_BYTES, _LOCATION_BYTES) if stream.seed & 2 else None
        )

    def _keep_and_send(self, message: _Unacknowledged) -> None:
        told, seq = decode(message.frames)
        self._journal.send(seq, told)
        super()._keep_and_send(message)

    def _handle(self, frames: list[bytes]) -> None:
        try:
            message, _ = decode(frames)
        except TraceError:
            message = None
        if isinstance(message, Ack):
            self._journal.acknowledge(message.seqs)
        super()._handle(frames)


class WitnessedProducer(RecordProducer):
    """A producer whose link writes down what happens."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        super().__init__(
            stream.endpoint,
            window_bytes=stream.window_bytes,
            resend_after_s=stream.resend_after_s,
            deadline_s=stream.deadline_s,
            overflow=stream.overflow,
        )

    def _link(self, endpoint: str, keys: object, options: LinkOptions) -> BridgeLink:
        return WitnessedLink(endpoint, self._stream, options)


def run(stream: Stream) -> None:
    """Stream to the end; the exit status is 1 if the bridge could not be used."""
    journal = Journal(stream.journal)
    shm_sender._MIN_BYTES = 1  # of a message whose rows are read out of memory
    try:
        with closing(WitnessedProducer(stream)) as producer:
            send_all(stream, producer)
            _flush(stream, producer)
            journal.mark(f"dropped {producer.dropped_rows.total()}")
        journal.mark("finished")
    except TraceError as error:
        journal.mark(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _flush(stream: Stream, producer: RecordProducer) -> None:
    """Wait for the last acknowledgements, for room only if there is no time limit."""
    try:
        producer.flush(stream.flush_s)
    except StoreFull:
        if stream.flush_s is None:
            raise


def send_all(stream: Stream, producer: RecordProducer) -> None:
    """Say hello, tell all positions, then send the rows in pieces and tell of them meanwhile."""
    expected, rng = stream.expected, np.random.default_rng(stream.seed)
    producer.register(expected.engine_id, LAYOUT)
    _tell(producer, expected, expected.whole, expected.rows, TrajectoryState.OPEN)
    _tell(producer, expected, expected.grown, 1, TrajectoryState.OPEN)
    producer.flush()
    time.sleep(stream.rest_s)
    row = messages = 0
    while row < expected.rows:
        stop = min(row + int(rng.integers(1, stream.most_rows + 1)), expected.end_of_version(row))
        for part in Part:
            payload, version = expected.payload(part, row, stop), expected.version(row)
            producer.send_rows(part, range(row, stop), payload, version)
        row, messages = stop, messages + 1
        if messages % _TELL_EVERY == 0:
            _tell(producer, expected, expected.whole, expected.rows, TrajectoryState.OPEN)
            _tell(producer, expected, expected.grown, row, TrajectoryState.OPEN)
            if rng.random() < 0.3:
                _tell_computed_anew(producer, expected, row)
        time.sleep(stream.pace_s)
    for name in (expected.whole, expected.grown):
        _tell(producer, expected, name, expected.rows, TrajectoryState.FINISHED)


def _tell(
    producer: RecordProducer, expected: Expected, name: str, stop: int, state: TrajectoryState
) -> None:
    producer.send_trajectory(name, 0, expected.tokens(stop), np.arange(stop), state)


def _tell_computed_anew(producer: RecordProducer, expected: Expected, stop: int) -> None:
    """As a retracted request does: the rows that sampled the tokens have to stay."""
    rows, tokens = np.arange(stop) + expected.rows, expected.tokens(stop)
    producer.send_trajectory(expected.grown, 0, tokens, rows, TrajectoryState.ABORTED)


def fill(endpoint: str, expected: Expected) -> None:
    """Send all records of an engine from this process, as fast as the bridge takes them."""
    with RecordProducer(endpoint) as producer:
        producer.register(expected.engine_id, LAYOUT)
        for first in range(0, expected.rows, _FILLED_ROWS):
            stop = min(first + _FILLED_ROWS, expected.end_of_version(first))
            for part in Part:
                payload, version = expected.payload(part, first, stop), expected.version(first)
                producer.send_rows(part, range(first, stop), payload, version)
        for name in (expected.whole, expected.grown):
            _tell(producer, expected, name, expected.rows, TrajectoryState.FINISHED)
