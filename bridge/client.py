"""The trainer's side: ask a bridge for records.

Shapes: T = positions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import zmq
from numpy.typing import ArrayLike, NDArray

from bridge.errors import BridgeUnreachable, CorruptMessage, TraceError
from bridge.layout import Site
from bridge.pages import join
from bridge.records import TrajectoryRecords
from bridge.refusal import exception
from bridge.wire import (
    Digests,
    DigestsReply,
    Error,
    Fetch,
    FetchReply,
    List,
    ListReply,
    Message,
    Ping,
    Pong,
    Stats,
    StatsReply,
    TrajectorySummary,
    decode,
    encode,
)

Reply = TypeVar("Reply", bound=Message)


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
        records = join(self._pages(fetch, time.monotonic() + (timeout_s or self._timeout_s)))
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

    def _pages(self, fetch: Fetch, end: float) -> list[FetchReply]:
        """Ask for page after page; begin again if the trajectory changes meanwhile."""
        pages: list[FetchReply] = []
        start = fetch.start
        while True:
            wanted = Fetch(fetch.trajectory, start, fetch.stop, fetch.layers, fetch.sites)
            page = self._ask(wanted, FetchReply, end)
            if pages and page.revision != pages[0].revision:
                pages, start = [], fetch.start
                continue
            pages.append(page)
            start = page.start + len(page.tokens)
            if start >= min(page.length, page.length if fetch.stop is None else fetch.stop):
                return pages

    def _ask(self, question: Message, kind: type[Reply], end: float | None = None) -> Reply:
        seq = self._next_seq
        self._next_seq += 1
        self._socket.send_multipart(encode(question, seq), copy=False)
        reply = self._receive(seq, end or time.monotonic() + self._timeout_s)
        if isinstance(reply, Error):
            raise exception(reply)
        if not isinstance(reply, kind):
            raise CorruptMessage(f"the bridge answered {question.KIND} with {reply.KIND}")
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
