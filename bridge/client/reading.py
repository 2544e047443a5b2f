"""Read trajectories from the bridges that hold them, in the order of the requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from msgspec.structs import replace

from bridge.client.connection import Connection
from bridge.client.merge import completed, elsewhere, require_one_meaning
from bridge.client.paging import Paging
from bridge.client.records import TrajectoryRecords
from bridge.errors import UnknownTrajectory
from bridge.transport.bridge_sharding import shard_of
from bridge.wire import Fetch


@dataclass(frozen=True, slots=True)
class TrajectoryReader:
    """Reads through connections until monotonic time ``end``.

    They are in the order of `bridge.transport.bridge_sharding`.
    """

    connections: Sequence[Connection]
    end: float

    def all(
        self, fetches: Sequence[Fetch], allow_unknown: bool
    ) -> Iterator[TrajectoryRecords | None]:
        """Yield the records of each fetch, None for an unknown trajectory if that is allowed.

        Requests to every bridge run ahead of the records that are yielded.
        """
        if len(self.connections) == 1:
            own_pages = Paging(self.connections[0], self.end).all(fetches, allow_unknown)
            with closing(own_pages):
                for records in own_pages:
                    yield records and require_one_meaning(records)
            return
        owners = [shard_of(fetch.trajectory, len(self.connections)) for fetch in fetches]
        with ExitStack() as reading:
            pages = []
            for number, connection in enumerate(self.connections):
                its = [
                    fetch for fetch, owner in zip(fetches, owners, strict=True) if owner == number
                ]
                own_pages = Paging(connection, self.end).all(its, allow_unknown)
                reading.callback(own_pages.close)
                pages.append(own_pages)
            for fetch, owner in zip(fetches, owners, strict=True):
                records = self._complete(fetch, owner, self._next(pages[owner]))
                yield records and require_one_meaning(records)

    def _next(self, coming: Iterator[TrajectoryRecords | None]) -> TrajectoryRecords | None:
        try:
            return next(coming)
        except UnknownTrajectory as error:
            raise UnknownTrajectory(
                f"{error}; name the same bridges in the same order as the rollout's --trace-bridge"
            ) from error

    def _complete(
        self, fetch: Fetch, owner: int, records: TrajectoryRecords | None
    ) -> TrajectoryRecords | None:
        """Fetch the rows that other bridges than the trajectory's owner hold.

        Rows at a bridge that does not know the trajectory stay missing.
        """
        if records is None:
            return None
        for number, at in elsewhere(records, owner).items():
            if not 0 <= number < len(self.connections):
                continue
            start = records.start + at.start
            wanted = replace(fetch, start=start, stop=records.start + at.stop)
            (other,) = Paging(self.connections[number], self.end).all([wanted], allow_unknown=True)
            if other is not None:
                records = completed(records, other, at)
        return records
