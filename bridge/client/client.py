"""The trainer's side: ask a bridge for records.

Shapes: T = positions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bridge.client.connection import Connection, Reply
from bridge.client.merge import joined_digests, joined_summaries, summed_gc, summed_stats
from bridge.client.records import TrajectoryRecords
from bridge.errors import TokenMismatch
from bridge.layout import Site, TensorSlice
from bridge.layout.tensor_slice import ALL_VALUES
from bridge.transport.bridge_sharding import parse_endpoints
from bridge.wire import (
    Ack,
    Digests,
    DigestsReply,
    Fetch,
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
)


class TraceClient:
    """Connections to a bridge, or several, that answer questions; use it from one thread.

    ``endpoint`` is one, or a comma-separated list in the order in which the engines name them
    (`bridge.transport.bridge_sharding`). ``keys`` is this client's key file (`bridge.keys`), for
    bridges that serve with keys.

    Every question may raise BridgeUnreachable after ``timeout_s`` without an answer of a bridge
    that is asked, and SchemaMismatch when it runs another version.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        keys: str | os.PathLike[str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._connections = [Connection(each, keys) for each in parse_endpoints(endpoint)]

    # --- records

    def fetch(
        self,
        trajectory: str,
        *,
        start: int = 0,
        stop: int | None = None,
        layers: Iterable[int] | None = None,
        sites: Iterable[Site] | None = None,
        tensor_slice: TensorSlice = ALL_VALUES,
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
            tensor_slice: values of fc2, K and V to return, those of a tensor-parallel rank.
            expect_tokens: int [T], the tokens from ``start`` on that the trainer is about to run.
            timeout_s: for the whole call, instead of the client's.

        Raises:
            UnknownTrajectory: the bridge holds nothing under the name.
            TokenMismatch: the recorded tokens are not ``expect_tokens``.
            LayoutError: a layer, site or value is asked for that the engine does not record.
        """
        expected_T = None if expect_tokens is None else np.asarray(expect_tokens)
        if expected_T is not None and stop is None:
            stop = start + len(expected_T)
        fetch = Fetch(trajectory, start, stop, *_names(layers, sites), tensor_slice)
        (records,) = self._read([fetch], False, timeout_s)
        assert records is not None
        if expected_T is not None:
            _check_tokens(records, expected_T)
        return records

    def fetch_ranges(
        self,
        trajectory: str,
        ranges: Iterable[tuple[int, int]],
        *,
        layers: Iterable[int] | None = None,
        sites: Iterable[Site] | None = None,
        tensor_slice: TensorSlice = ALL_VALUES,
        timeout_s: float | None = None,
    ) -> list[TrajectoryRecords]:
        """Return the records of several ranges [start, stop) of positions, in their order.

        For a rank that computes parts of a sequence, such as the two chunks of a context-parallel
        rank. All are of one revision: the trajectory was not told anew between them. What lies
        between the ranges does not travel.

        Raises:
            UnknownTrajectory: the bridge holds nothing under the name.
            LayoutError: a layer, site or value is asked for that the engine does not record.
        """
        narrowed = _names(layers, sites)
        fetches = [Fetch(trajectory, *each, *narrowed, tensor_slice) for each in ranges]
        end = time.monotonic() + (timeout_s or self._timeout_s)
        while True:
            found = [
                records
                for records in self._read(fetches, False, end - time.monotonic())
                if records is not None
            ]
            if len({records.revision for records in found}) <= 1:
                return found

    def fetch_all(
        self,
        trajectories: Iterable[str],
        *,
        layers: Iterable[int] | None = None,
        sites: Iterable[Site] | None = None,
        tensor_slice: TensorSlice = ALL_VALUES,
        allow_unknown: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[TrajectoryRecords | None]:
        """Yield the records of whole trajectories in order, reading ahead of what is yielded.

        Faster than one `fetch` after the other, which lets the bridge wait for the reader. Use the
        client for nothing else until the last one is yielded.

        Args:
            trajectories: names.
            layers: layers whose fc1, fc2, k and v to return; None: all recorded.
            sites: sites to return; None: all recorded.
            tensor_slice: values of fc2, K and V to return, those of a tensor-parallel rank.
            allow_unknown: yield None for a name under which nothing is held.
            timeout_s: for the whole call, instead of the client's.

        Raises:
            UnknownTrajectory: the bridge holds nothing under a name.
            LayoutError: a layer, site or value is asked for that the engine does not record.
        """
        narrowed = _names(layers, sites)
        fetches = [Fetch(name, 0, None, *narrowed, tensor_slice) for name in trajectories]
        return self._read(fetches, allow_unknown, timeout_s)

    # --- what is held

    def list_trajectories(self, prefix: str = "") -> list[TrajectorySummary]:
        """Return what is held of every trajectory whose name begins with ``prefix``."""
        listed = [self._list(connection, prefix) for connection in self._connections]
        return listed[0] if len(listed) == 1 else joined_summaries(listed)

    def digests(self, weight_version: str, engine_id: str | None = None) -> dict[str, str]:
        """Return tensor name -> hex digest of an engine's quantized weights, empty if untold.

        Without ``engine_id`` the reports of all engines are joined; where two of them name the same
        tensor, the engine that reported last counts.
        """
        by_engine = joined_digests(self._ask(Digests(weight_version), DigestsReply))
        joined: dict[str, str] = {}
        for engine, digests in by_engine.items():
            if engine_id in (None, engine):
                joined.update(digests)
        return joined

    def stats(self) -> StatsReply:
        """Return the counters, summed over the bridges."""
        return summed_stats(self._ask(Stats(), StatsReply))

    def ping(self) -> None:
        """Return when every bridge answers."""
        self._ask(Ping(), Pong)

    # --- what a trainer says of the life of records, to every bridge

    def begin_step(self, step: int) -> None:
        """Tell that RL step ``step`` begins: what is recorded from here on belongs to it.

        A bridge that serves with --keep N then gives up what was last told N steps ago. A trainer
        that resumes from an earlier checkpoint says an earlier step: what is recorded from there on
        is kept as long as any other, and what it had recorded before is kept until as many other
        steps have begun.
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
        return summed_gc(self._ask(Gc(policy), GcReply))

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, question: Message, kind: type[Reply]) -> list[Reply]:
        """Ask all bridges at a time; return their replies in order."""
        end = time.monotonic() + self._timeout_s
        asked = [(each, each.say(question)) for each in self._connections]
        try:
            return [each.reply(seq, kind, end) for each, seq in asked]
        finally:
            for each, seq in asked:
                each.forget([seq])

    def _list(self, connection: Connection, prefix: str) -> list[TrajectorySummary]:
        summaries: list[TrajectorySummary] = []
        after: int | None = 0
        while after is not None:
            end = time.monotonic() + self._timeout_s
            reply = connection.ask(List(after, prefix), ListReply, end)
            summaries += reply.summaries
            after = reply.next
        return summaries

    def _read(
        self, fetches: list[Fetch], allow_unknown: bool, timeout_s: float | None
    ) -> Iterator[TrajectoryRecords | None]:
        from bridge.client.reading import Reading  # torch, which only a reader of records needs

        end = time.monotonic() + (timeout_s or self._timeout_s)
        return Reading(self._connections, end).all(fetches, allow_unknown)


def _names(
    layers: Iterable[int] | None, sites: Iterable[Site] | None
) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None]:
    return (
        None if layers is None else tuple(layers),
        None if sites is None else tuple(str(site) for site in sites),
    )


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
