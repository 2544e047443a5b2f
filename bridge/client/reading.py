"""Read trajectories from the bridges that hold them, in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from bridge.client.connection import Connection
from bridge.client.merge import completed, elsewhere, require_one_meaning
from bridge.client.paging import Paging
from bridge.client.records import TrajectoryRecords
from bridge.errors import UnknownTrajectory
from bridge.transport.bridge_sharding import home_of
from bridge.wire import Fetch


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads through connections until monotonic time ``end``.

    They are in the order of `bridge.transport.bridge_sharding`.
    """

    connections: Sequence[Connection]
    end: float

    def all(
        self, fetches: Sequence[Fetch], allow_unknown: bool
    ) -> Iterator[TrajectoryRecords | None]:
        """Yield the records of each fetch, None for an unknown trajectory if that is allowed.

        Every bridge is asked ahead of what is yielded.
        """
        if len(self.connections) == 1:
            its_pages = Paging(self.connections[0], self.end).all(fetches, allow_unknown)
            with closing(its_pages):
                for records in its_pages:
                    yield records and require_one_meaning(records)
            return
        homes = [home_of(fetch.trajectory, len(self.connections)) for fetch in fetches]
        with ExitStack() as reading:
            pages = []
            for number, connection in enumerate(self.connections):
                its = [fetch for fetch, home in zip(fetches, homes, strict=True) if home == number]
                its_pages = Paging(connection, self.end).all(its, allow_unknown)
                reading.callback(its_pages.close)
                pages.append(its_pages)
            for fetch, home in zip(fetches, homes, strict=True):
                records = self._whole(fetch, home, self._next(pages[home]))
                yield records and require_one_meaning(records)

    def _next(self, coming: Iterator[TrajectoryRecords | None]) -> TrajectoryRecords | None:
        try:
            return next(coming)
        except UnknownTrajectory as error:
            raise UnknownTrajectory(
                f"{error}; name the same bridges in the same order as the rollout's --trace-bridge"
            ) from error

    def _whole(
        self, fetch: Fetch, home: int, records: TrajectoryRecords | None
    ) -> TrajectoryRecords | None:
        """Fetch the rows that lie at other bridges than the trajectory's home; others are missing.

        A bridge that does not know the trajectory has lost its rows too.
        """
        if records is None:
            return None
        for number, at in elsewhere(records, home).items():
            if not 0 <= number < len(self.connections):
                continue
            start = records.start + at.start
            wanted = replace(fetch, start=start, stop=records.start + at.stop)
            (other,) = Paging(self.connections[number], self.end).all([wanted], allow_unknown=True)
            if other is not None:
                records = completed(records, other, at)
        return records
