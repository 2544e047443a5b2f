"""The status document of one daemon: the daemon's thread builds it, all views read it.

Counters begin at zero when the daemon starts, except those of ``held``, which describe the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from bridge.errors import CorruptMessage
from bridge.layout import Part
from bridge.observe.histogram import Histogram
from bridge.wire import StatsReply, TrajectoryState

RATE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows that the daemon has received but not acknowledged, because the store is working on them.

    ``oldest_s`` is the waiting time of the oldest message. Messages in sockets do not count.
    """

    rows: int
    nbytes: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """State after the last write to the store: "ok", or "full" or "failing" with a ``reason``.

    ``for_s`` is the duration of this state in seconds.
    """

    state: str
    reason: str
    for_s: float


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine, its stored and dropped rows, and the seconds since its last message.

    ``idle_s`` is None for an engine that has sent nothing since the daemon started.
    """

    engine: str
    idle_s: float | None
    forward_rows: int
    kv_rows: int
    dropped_rows: int


class Sample(NamedTuple):
    """Counters at one moment, ``at`` seconds after the start; rates are their differences."""

    at: float
    rows_in: int
    bytes_in: int
    rows_out: int
    bytes_out: int
    dropped_rows: int
    acks: int
    ack_s: float


@dataclass(frozen=True, slots=True)
class Status:
    """All values that views can show.

    ``rows_received`` and ``bytes_received`` count stored and acknowledged rows, ``*_sent`` rows
    sent to trainers, ``refused`` messages by error class, ``ack_latency`` the time from receiving
    a message to acknowledging it. ``collected`` counts removed trajectories by their state: an
    open one expired or became too old before it finished. ``history`` has about one
    sample a second, oldest first. ``age_s`` is how old the other fields were when the daemon
    handed the document out, by the daemon's monotonic clock.
    """

    endpoint: str
    pid: int
    taken_at: float
    uptime_s: float
    held: StatsReply
    rows_received: dict[Part, int]
    bytes_received: dict[Part, int]
    rows_sent: dict[Part, int]
    bytes_sent: dict[Part, int]
    refused: dict[str, int]
    waiting: Waiting
    ack_latency: Histogram
    trajectories: dict[TrajectoryState, int]
    collected: dict[TrajectoryState, int]
    engines: tuple[EngineStatus, ...]
    history: tuple[Sample, ...]
    store: StoreStatus
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Recent rates per second; ``ack_s`` is the mean latency, None without acknowledgements."""

    rows_in: float
    bytes_in: float
    rows_out: float
    bytes_out: float
    dropped_rows: float
    ack_s: float | None


def rates(status: Status) -> Rates:
    """Return rates over the last `RATE_WINDOW_S` seconds of the history."""
    last = status.history[-1]
    first = next(sample for sample in status.history if last.at - sample.at <= RATE_WINDOW_S)
    passed = last.at - first.at or 1.0
    acks = last.acks - first.acks
    return Rates(
        rows_in=(last.rows_in - first.rows_in) / passed,
        bytes_in=(last.bytes_in - first.bytes_in) / passed,
        rows_out=(last.rows_out - first.rows_out) / passed,
        bytes_out=(last.bytes_out - first.bytes_out) / passed,
        dropped_rows=(last.dropped_rows - first.dropped_rows) / passed,
        ack_s=(last.ack_s - first.ack_s) / acks if acks else None,
    )


def to_json(status: Status) -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(status)


def from_json(document: bytes) -> Status:
    """Return the status of a document; raise CorruptMessage if it is not one."""
    try:
        return msgspec.json.decode(document, type=Status)
    except msgspec.MsgspecError as error:
        raise CorruptMessage(
            f"the bridge's status is unreadable ({error}); "
            "install the same sglang-trace version on both sides"
        ) from error
