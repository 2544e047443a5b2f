"""The trainer's side: ask a bridge for records.

Shapes: T = positions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import zmq
from numpy.typing import ArrayLike, NDArray

from bridge.errors import BridgeUnreachable, CorruptMessage, TraceError
from bridge.layout import Site
from bridge.records import TrajectoryRecords
from bridge.refusal import exception
from bridge.wire import (
    Ack,
    Digests,
    DigestsReply,
    Error,
    Fetch,
    FetchReply,
    Gc,
    GcReply,
    List,
    ListReply,
    Message,
    Pin,
    Ping,
    Policy,
    Pong,
    Stats,
    StatsReply,
    Step,
    TrajectorySummary,
    decode,
    encode,
)

Reply = TypeVar("Reply", bound=Message)

# Pages asked for at a time: the bridge reads one while another travels. (bridge.daemon.outbox)
_PAGES_AHEAD = 3


class TokenMismatch(TraceError):
    """The bridge's trajectory has other tokens than the trainer's: its records must not guide."""


class TraceClient:
    """A connection to a bridge that answers questions; use it from one thread.

    Every question may raise BridgeUnreachable after ``timeout_s`` without an answer and
    SchemaMismatch when the bridge runs another version.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = 30.0) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket = self._connect()
        self._next_seq = 0

    def fetch(
        self,
        trajectory: str,
        *,
        start: int = 0,
        stop: int | None = None,
        layers: Iterable[int] | None = None,
        sites: Iterable[Site] | None = None,
        expect_tokens: ArrayLike | None = None,
        timeout_s: float | None = None,
    ) -> TrajectoryRecords:
        """Return the records of positions [start, stop), stop None or too large: to the end.

        Args:
            trajectory: the name under which it was generated.
            start: absolute position of the first token.
            stop: absolute position behind the last; with expect_tokens, None is their end.
            layers: layers whose fc1, fc2, k and v to return; None: all recorded.
            sites: sites to return; None: all recorded.
            expect_tokens: int [T], the tokens from ``start`` on that the trainer is about to run.
            timeout_s: for the whole call, instead of the client's.

        Raises:
            UnknownTrajectory: the bridge holds nothing under the name.
            TokenMismatch: the recorded tokens are not ``expect_tokens``.
            LayoutError: a layer or site is asked for that the engine does not record.
        """
        expected_T = None if expect_tokens is None else np.asarray(expect_tokens)
        if expected_T is not None and stop is None:
            stop = start + len(expected_T)
        fetch = Fetch(
            trajectory,
            start,
            stop,
            None if layers is None else tuple(layers),
            None if sites is None else tuple(str(site) for site in sites),
        )
        records = self._records(fetch, time.monotonic() + (timeout_s or self._timeout_s))
        if expected_T is not None:
            _check_tokens(records, expected_T)
        return records

    def list_trajectories(self, prefix: str = "") -> list[TrajectorySummary]:
        """Return what is held of every trajectory whose name begins with ``prefix``."""
        summaries: list[TrajectorySummary] = []
        after: int | None = 0
        while after is not None:
            reply = self._ask(List(after, prefix), ListReply)
            summaries += reply.summaries
            after = reply.next
        return summaries

    def digests(self, weight_version: str, engine_id: str | None = None) -> dict[str, str]:
        """Return tensor name -> hex digest of an engine's quantized weights, empty if untold.

        Without ``engine_id`` the reports of all engines are joined; where two of them name the same
        tensor, the engine that reported last counts.
        """
        by_engine = self._ask(Digests(weight_version), DigestsReply).by_engine
        joined: dict[str, str] = {}
        for engine, digests in by_engine.items():
            if engine_id in (None, engine):
                joined.update(digests)
        return joined

    def stats(self) -> StatsReply:
        """Return the daemon's counters."""
        return self._ask(Stats(), StatsReply)

    def ping(self) -> None:
        """Return when the daemon answers."""
        self._ask(Ping(), Pong)

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- what a trainer says of the life of records

    def begin_step(self, step: int) -> None:
        """Tell that RL step ``step`` begins: what is recorded from here on belongs to it.

        A bridge that serves with --keep N then gives up what was last told N steps ago.
        """
        self._ask(Step(step), Ack)

    def pin(self, trajectories: Iterable[str], lease_s: int = 3600) -> None:
        """Keep trajectories for at most ``lease_s`` seconds, whatever is collected meanwhile."""
        self._ask(Pin(tuple(trajectories), lease_s), Pong)

    def unpin(self, trajectories: Iterable[str]) -> None:
        """Let pinned trajectories go."""
        self._ask(Pin(tuple(trajectories), 0), Pong)

    def gc(self, policy: Policy) -> GcReply:
        """Collect by a policy now; return what was collected."""
        return self._ask(Gc(policy), GcReply)

    # --- pages

    def _records(self, fetch: Fetch, end: float) -> TrajectoryRecords:
        from bridge.pages import join  # torch, which only a reader of records needs

        while True:
            try:
                return join(self._pages(fetch, end), fetch.stop)
            except _Changed:
                continue

    def _pages(self, fetch: Fetch, end: float) -> Iterator[FetchReply]:
        """Yield the pages of one revision of a trajectory, asking ahead while pages are read.

        Raises:
            _Changed: the trajectory was told anew meanwhile.
        """
        first = self._reply(self._say(fetch), FetchReply, end)
        yield first
        stop = first.length if fetch.stop is None else min(fetch.stop, first.length)
        step = len(first.tokens)
        starts = iter(range(first.start + step, stop, max(1, step)))
        asked: deque[int] = deque()
        while True:
            for start in islice(starts, _PAGES_AHEAD - len(asked)):
                asked.append(self._say(replace(fetch, start=start, stop=min(stop, start + step))))
            if not asked:
                return
            page = self._reply(asked.popleft(), FetchReply, end)
            if page.revision != first.revision:
                raise _Changed
            yield page

    # --- questions and replies

    def _ask(self, question: Message, kind: type[Reply]) -> Reply:
        return self._reply(self._say(question), kind, time.monotonic() + self._timeout_s)

    def _say(self, question: Message) -> int:
        seq = self._next_seq
        self._next_seq += 1
        self._socket.send_multipart(encode(question, seq), copy=False)
        return seq

    def _reply(self, seq: int, kind: type[Reply], end: float) -> Reply:
        reply = self._receive(seq, end)
        if isinstance(reply, Error):
            raise exception(reply)
        if not isinstance(reply, kind):
            raise CorruptMessage(f"the bridge answered with {reply.KIND} where {kind.KIND} is due")
        return reply

    def _receive(self, seq: int, end: float) -> Message:
        """Return the answer to ``seq``; answers to questions given up before are passed over."""
        while self._socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            frames = self._socket.recv_multipart(copy=False)
            message, answered = decode([frame.buffer for frame in frames])
            if answered == seq or (isinstance(message, Error) and answered < 0):
                return message
        self._socket.close(linger=0)
        self._socket = self._connect()
        raise BridgeUnreachable(
            f"no bridge answers at {self.endpoint}; start it: python -m bridge serve "
            f"--endpoint {self.endpoint}"
        )

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.endpoint)
        return socket


class _Changed(Exception):
    """A trajectory was told anew between two of its pages."""


def _check_tokens(records: TrajectoryRecords, expected_T: NDArray[np.int_]) -> None:
    recorded_T = records.tokens.numpy()
    if len(recorded_T) != len(expected_T):
        raise TokenMismatch(
            f"trajectory {records.trajectory!r} has {records.length} tokens and positions "
            f"{records.start} to {records.start + len(expected_T)} are asked for; "
            "pass the token ids that were generated under this name"
        )
    differs = np.flatnonzero(recorded_T != expected_T)
    if len(differs):
        first = int(differs[0])
        raise TokenMismatch(
            f"trajectory {records.trajectory!r} has token {recorded_T[first]} at position "
            f"{records.start + first} and the trainer {expected_T[first]}; "
            "pass the token ids that were generated under this name"
        )
