"""Fetch trajectories page by page, asking ahead so that bridge, wire and reader work at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from bridge.connection import Connection
from bridge.errors import UnknownTrajectory
from bridge.pages import join
from bridge.records import TrajectoryRecords
from bridge.wire import Fetch, FetchReply

_PAGES_AHEAD = 3
_TRAJECTORIES_AHEAD = 2


class _Changed(Exception):
    """A trajectory was told anew between two of its pages."""


@dataclass(frozen=True, slots=True)
class Paging:
    """Reads through one connection until monotonic time ``end``."""

    connection: Connection
    end: float

    def all(
        self, fetches: Iterable[Fetch], allow_unknown: bool
    ) -> Generator[TrajectoryRecords | None]:
        """Yield the records of each fetch in order, None for an unknown one if that is allowed."""
        coming = iter(fetches)
        asked: deque[tuple[Fetch, int]] = deque()
        try:
            while True:
                for fetch in islice(coming, _TRAJECTORIES_AHEAD - len(asked)):
                    asked.append((fetch, self.connection.say(fetch)))
                if not asked:
                    return
                try:
                    records: TrajectoryRecords | None = self._one(*asked.popleft())
                except UnknownTrajectory:
                    if not allow_unknown:
                        raise
                    records = None
                yield records
        finally:
            self.connection.forget(seq for _, seq in asked)

    def _one(self, fetch: Fetch, first: int) -> TrajectoryRecords:
        """Return the records of a fetch that was asked under ``first``."""
        while True:
            try:
                return join(self._pages(fetch, first), fetch.stop)
            except _Changed:
                first = self.connection.say(fetch)

    def _pages(self, fetch: Fetch, seq: int) -> Iterator[FetchReply]:
        """Yield the pages of one revision of a trajectory.

        Raises:
            _Changed: the trajectory was told anew meanwhile.
        """
        first = self.connection.reply(seq, FetchReply, self.end)
        stop = first.length if fetch.stop is None else min(fetch.stop, first.length)
        step = len(first.tokens)
        starts = iter(range(first.start + step, stop, max(1, step)))
        asked: deque[int] = deque()
        page = first
        try:
            while True:
                for start in islice(starts, _PAGES_AHEAD - len(asked)):
                    wanted = replace(fetch, start=start, stop=min(stop, start + step))
                    asked.append(self.connection.say(wanted))
                yield page
                if not asked:
                    return
                page = self.connection.reply(asked.popleft(), FetchReply, self.end)
                if page.revision != first.revision:
                    raise _Changed
        finally:
            self.connection.forget(asked)
