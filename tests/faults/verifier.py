"""Read everything back as a trainer does and compare it with what was recorded and promised.

Shape legend: T = positions, R = bytes of a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.client.records import TrajectoryRecords
from bridge.errors import UnknownTrajectory
from bridge.layout import Part
from tests.faults.engine import Stream
from tests.faults.expected import LAYOUT, Expected
from tests.faults.journal import Promises, Reported
from tests.faults.outcome import Outcome

_POSITIONS = 16_384  # of one fetch


def verify(client: TraceClient, stream: Stream, sent_after: str | None = None) -> Outcome:
    """Read both trajectories of an engine, which may go on meanwhile.

    Rows that were not promised may be missing, with ``sent_after`` also those that were promised
    before that mark of the journal.
    """
    promises = stream.promises(sent_after)
    outcome = Outcome(acknowledged=promises.count)
    for name in (stream.expected.whole, stream.expected.grown):
        told = promises.told[name]
        stop, length = _named(told, promises.sent[name]), 1
        start = 0
        while start < max(length, stop):
            try:
                records = client.fetch(name, start=start, stop=start + _POSITIONS)
            except UnknownTrajectory:
                if told:
                    outcome.lost += promises.count
                    outcome.reports.append(f"{name} was acknowledged and is not known")
                break
            compared, wrong = compare(records, stream.expected)
            outcome.compared += compared
            outcome.wrong += wrong
            missing = _missing(records, promises, min(stop, start + _POSITIONS))
            outcome.lost += missing
            if missing:
                outcome.reports.append(f"{missing} promised rows of {name} are missing")
            outcome.reports += _misreported(records, told, stream.promises().sent[name])
            start, length = start + _POSITIONS, records.length
    return outcome


def compare(records: TrajectoryRecords, expected: Expected, first_row: int = 0) -> tuple[int, int]:
    """Return (rows compared, rows wrong) of any part of a trajectory; missing rows are neither.

    Its position 0 is row ``first_row`` of the engine.
    """
    first = first_row + records.start
    stop = first + len(records)
    wrong_T = records.tokens.numpy() != expected.tokens(stop)[first:]
    compared = wrong = 0
    for part in Part:
        valid_T, rows_TR = part_of(records, part)
        right_TR = expected.payload(part, first, stop)[:, : rows_TR.shape[1]]
        differs_T = (rows_TR != right_TR).any(axis=1) | wrong_T
        differs_T |= ~_origin_is_right(records, expected, first)
        compared += int(valid_T.sum())
        wrong += int((valid_T & differs_T).sum())
    return compared, wrong


def _origin_is_right(
    records: TrajectoryRecords, expected: Expected, first: int
) -> NDArray[np.bool_]:
    """Whether engine and weight version are those of each row, from row ``first`` on: bool [T]."""
    stop = first + len(records)
    # The last entry is what index -1 finds.
    versions = np.array([*records.weight_versions, ""])[records.weight_version_index.numpy()]
    engines = np.array([*records.engine_ids, ""])[records.engine_index.numpy()]
    right = np.array([expected.version(row) for row in range(first, stop)])
    answer: NDArray[np.bool_] = (versions == right) & (engines == expected.engine_id)
    return answer


def _named(told: list[Reported], sent: list[Reported]) -> int:
    """Return the end of the positions whose first telling is promised and names rows that are sent.

    One that names rows computed anew, which are never sent, comes first where an engine that may
    drop has given up the one before it.
    """
    promised, stop = {item.seq for item in told}, 0
    for item in sent:
        if item.stop > stop:
            if item.seq not in promised or item.first_row != 0:
                return stop
            stop = item.stop
    return stop


def _missing(records: TrajectoryRecords, promises: Promises, stop: int) -> int:
    """Count promised rows up to ``stop`` that are not there."""
    positions = max(0, stop - records.start)
    missing = 0
    for part in Part:
        promised_T = promises.rows[part][records.start : stop]
        held_T = np.zeros(positions, dtype=np.bool_)
        valid_T, _ = part_of(records, part)
        held_T[: len(valid_T)] = valid_T[:positions]
        missing += int((promised_T & ~held_T).sum())
    return missing


def _misreported(
    records: TrajectoryRecords, told: list[Reported], sent: list[Reported]
) -> list[str]:
    """The state must be the last promised one or one that was sent after it."""
    if not told:
        return []
    last = max(told, key=lambda item: item.seq)
    possible = {item.state for item in sent if item.seq >= last.seq}
    if records.state in possible:
        return []
    return [f"{records.trajectory} is {records.state} where {sorted(possible)} was acknowledged"]


def part_of(records: TrajectoryRecords, part: Part) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Return (valid, rows): bool [T], uint8 [T, R]."""
    assert records.layout == LAYOUT
    if part is Part.FORWARD:
        return records.forward_valid.numpy(), records.forward.numpy()
    return records.kv_valid.numpy(), records.kv.numpy()
