"""The trainer's side: fetch records from a bridge.

Shape legend: T = positions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

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


class TraceClient(AbstractContextManager["TraceClient"]):
    """A client of one bridge or several; use it from one thread.

    ``endpoint`` is one, or a comma-separated list in the order in which the engines name them
    (`bridge.transport.bridge_sharding`). ``keys`` is this client's key file (`bridge.keys`), for
    bridges that serve with keys.

    Every method may raise BridgeUnreachable if a bridge does not answer within ``timeout_s``
    seconds, and SchemaMismatch if it runs another version.
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
            UnknownTrajectory: the bridge has no records of this name.
            TokenMismatch: the recorded tokens are not ``expect_tokens``.
            LayoutError: the engine does not record a requested layer, site or value.
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
        rank. All ranges are of one revision of the trajectory. Positions between the ranges are
        not sent.

        Raises:
            UnknownTrajectory: the bridge has no records of this name.
            LayoutError: the engine does not record a requested layer, site or value.
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

        Faster than calling `fetch` in a loop, where the bridge waits for the reader. Do not use the
        client for anything else until the last item is yielded.

        Args:
            trajectories: names.
            layers: layers whose fc1, fc2, k and v to return; None: all recorded.
            sites: sites to return; None: all recorded.
            tensor_slice: values of fc2, K and V to return, those of a tensor-parallel rank.
            allow_unknown: yield None for an unknown name.
            timeout_s: for the whole call, instead of the client's.

        Raises:
            UnknownTrajectory: the bridge has no records of a name.
            LayoutError: the engine does not record a requested layer, site or value.
        """
        narrowed = _names(layers, sites)
        fetches = [Fetch(name, 0, None, *narrowed, tensor_slice) for name in trajectories]
        return self._read(fetches, allow_unknown, timeout_s)

    # --- summaries and counters

    def list_trajectories(self, prefix: str = "") -> list[TrajectorySummary]:
        """Return a summary of every trajectory whose name begins with ``prefix``."""
        listed = [self._list(connection, prefix) for connection in self._connections]
        return listed[0] if len(listed) == 1 else joined_summaries(listed)

    def digests(self, weight_version: str, engine_id: str | None = None) -> dict[str, str]:
        """Return tensor name -> hex digest of an engine's quantized weights, empty if unreported.

        Without ``engine_id`` the reports of all engines are joined. If two of them name the same
        tensor, the later report wins.
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

    # --- retention, at every bridge

    def begin_step(self, step: int) -> None:
        """Announce that RL step ``step`` begins; later records belong to it.

        A bridge that serves with --keep N then deletes records that were last reported N steps ago.
        A trainer that resumes from an earlier checkpoint announces an earlier step. Records from
        there on are kept as long as any others, and older ones until as many other steps have
        begun.
        """
        self._ask(Step(step), Ack)

    def pin(self, trajectories: Iterable[str], lease_s: int = 3600) -> None:
        """Protect trajectories from deletion for ``lease_s`` seconds."""
        self._ask(Pin(tuple(trajectories), lease_s), Pong)

    def unpin(self, trajectories: Iterable[str]) -> None:
        """End the protection of pinned trajectories."""
        self._ask(Pin(tuple(trajectories), 0), Pong)

    def gc(self, policy: Policy) -> GcReply:
        """Delete by a policy now; return the counts of what was deleted."""
        return summed_gc(self._ask(Gc(policy), GcReply))

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Message, kind: type[Reply]) -> list[Reply]:
        """Send a request to all bridges at once; return their replies in order."""
        end = time.monotonic() + self._timeout_s
        sent = [(each, each.send(request)) for each in self._connections]
        try:
            return [each.receive(seq, kind, end) for each, seq in sent]
        finally:
            for each, seq in sent:
                each.cancel([seq])

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
        from bridge.client.reading import TrajectoryReader  # imports torch

        end = time.monotonic() + (timeout_s or self._timeout_s)
        return TrajectoryReader(self._connections, end).all(fetches, allow_unknown)


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
            f"{records.start} to {records.start + len(expected_T)} were requested; "
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
