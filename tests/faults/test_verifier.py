"""The fault table's own eyes: whatever goes wrong with an engine's records is seen and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.client.client import TraceClient
from bridge.layout import Part
from bridge.wire import Rows, Trajectory, TrajectoryState
from tests.faults.engine import Stream, WitnessedProducer, send_all
from tests.faults.expected import Expected
from tests.faults.fault import Fault, Repetition
from tests.faults.journal import Journal
from tests.faults.outcome import Hang, Memory, Outcome
from tests.faults.processes import Bridge
from tests.faults.repeat import repeat
from tests.faults.verifier import verify

ROWS = 40


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    with closing(Bridge()) as running:
        yield running


@pytest.fixture
def stream(bridge: Bridge, tmp_path: Path, request: pytest.FixtureRequest) -> Stream:
    return Stream(bridge.endpoint, Expected(request.node.name, ROWS), tmp_path / "journal", 0)


def verified(stream: Stream) -> Outcome:
    with TraceClient(stream.endpoint) as client:
        return verify(client, stream)


def streamed(stream: Stream, kind: type[WitnessedProducer] = WitnessedProducer) -> None:
    with closing(kind(stream)) as producer:
        send_all(stream, producer)
        producer.flush()


def test_what_is_as_it_should_be_is_no_violation(stream: Stream) -> None:
    streamed(stream)
    outcome = verified(stream)
    assert not outcome.violated
    assert (outcome.acknowledged, outcome.compared) == (2 * ROWS, 4 * ROWS)


def test_a_row_with_one_other_byte_is_wrong(stream: Stream) -> None:
    class Altered(WitnessedProducer):
        def send_rows(self, part: Part, rows: Any, payload: Any, *more: Any) -> None:
            if part is Part.KV and 0 in rows:
                payload[0, -1] ^= 1
            super().send_rows(part, rows, payload, *more)

    streamed(stream, Altered)
    assert verified(stream).wrong == 2  # one a trajectory


def test_a_row_of_other_weights_is_wrong(stream: Stream) -> None:
    class OtherWeights(WitnessedProducer):
        def send_rows(self, part: Part, rows: Any, payload: Any, version: str) -> None:
            super().send_rows(part, rows, payload, version + "x" if 0 in rows else version)

    streamed(stream, OtherWeights)
    assert verified(stream).wrong >= 4


def test_other_tokens_are_wrong(stream: Stream) -> None:
    class OtherTokens(WitnessedProducer):
        def send_trajectory(self, name: str, start: int, tokens: Any, *more: Any) -> None:
            tokens[0] += 1
            super().send_trajectory(name, start, tokens, *more)

    streamed(stream, OtherTokens)
    assert verified(stream).wrong == 4


@pytest.mark.parametrize("part", Part)
def test_an_acknowledged_row_that_is_not_there_is_lost(stream: Stream, part: Part) -> None:
    streamed(stream)
    unsent = Expected(stream.expected.engine_id, ROWS + 1)
    longer = Stream(stream.endpoint, unsent, stream.journal, 0)
    with closing(Journal(stream.journal)) as journal:
        rows = np.array([ROWS])
        journal.send(900, Rows.of("e", part, rows, unsent.payload(part, ROWS, ROWS + 1), "v"))
        told = unsent.tokens(ROWS + 1), np.arange(ROWS + 1)
        journal.send(901, Trajectory("e", unsent.whole, 0, *told, TrajectoryState.FINISHED))
        assert not verified(longer).violated
        journal.acknowledge((900, 901))
    assert verified(longer).lost == 1


def test_an_acknowledged_trajectory_that_is_not_known_is_lost(stream: Stream) -> None:
    with closing(Journal(stream.journal)) as journal:
        tokens, rows = stream.expected.tokens(ROWS), np.arange(ROWS)
        payload = stream.expected.payload(Part.KV, 0, ROWS)
        journal.send(
            0, Trajectory("e", stream.expected.whole, 0, tokens, rows, TrajectoryState.OPEN)
        )
        journal.send(1, Rows.of("e", Part.KV, rows, payload, "v"))
        journal.acknowledge((0, 1))
    outcome = verified(stream)
    assert outcome.lost == ROWS
    assert len(outcome.reports) == 1


def test_a_state_that_was_overtaken_is_reported(stream: Stream) -> None:
    streamed(stream)
    with closing(Journal(stream.journal)) as journal:
        tokens, rows = stream.expected.tokens(ROWS), np.arange(ROWS)
        journal.send(
            900, Trajectory("e", stream.expected.grown, 0, tokens, rows, TrajectoryState.ABORTED)
        )
        assert not verified(stream).violated
        journal.acknowledge((900,))
    assert "is finished where ['aborted'] was acknowledged" in verified(stream).reports[0]


def test_promises_of_a_half_written_line_and_of_before_a_mark_do_not_count(tmp_path: Path) -> None:
    stream = Stream("", Expected("e", ROWS), tmp_path / "journal", 0)
    rows = [np.array([row]) for row in range(4)]
    payload = np.zeros((1, 1), dtype=np.uint8)
    with closing(Journal(stream.journal)) as journal:
        for seq in range(2):
            journal.send(seq, Rows.of("e", Part.KV, rows[seq], payload, "v"))
        journal.acknowledge((0,))
        journal.mark("restarted")
        journal.acknowledge((1,))
        for seq in (2, 3):
            journal.send(seq, Rows.of("e", Part.KV, rows[seq], payload, "v"))
        journal.acknowledge((2,))
        journal.acknowledge((3,))
    whole = stream.journal.read_bytes()
    stream.journal.write_bytes(whole[:-3])
    assert np.flatnonzero(stream.promises().rows[Part.KV]).tolist() == [0, 1, 2]
    assert np.flatnonzero(stream.promises("restarted").rows[Part.KV]).tolist() == [2]


def _hang(_repetition: Repetition) -> Outcome:
    raise Hang("it comes")


def _break(_repetition: Repetition) -> Outcome:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("run", "seen"),
    [
        (_hang, Outcome(hangs=1, reports=["not in time: it comes"])),
        (_break, Outcome(reports=["ValueError: no such thing"])),
        (lambda _: Outcome(lost=1), Outcome(lost=1)),
        (lambda _: Outcome(wrong=1), Outcome(wrong=1)),
        (lambda _: Outcome(memory=Memory(11, 10)), Outcome(memory=Memory(11, 10))),
    ],
)
def test_every_violation_is_named_by_its_seed(run: Any, seen: Outcome, tmp_path: Path) -> None:
    row = repeat(Fault("a fault", "memory", run), [7, 8], scratch=tmp_path)
    assert row.violations == {7: seen, 8: seen}


def test_the_fullest_memory_of_all_repetitions_counts() -> None:
    outcomes = [Outcome(memory=Memory(peak, 10)) for peak in (3, 9, 5)]
    assert sum([*outcomes, Outcome()], Outcome()).memory == Memory(9, 10)
