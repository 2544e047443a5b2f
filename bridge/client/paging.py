"""Fetch trajectories page by page, with requests ahead so that daemon and reader overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from bridge.client.assemble import Page, join
from bridge.client.connection import Connection
from bridge.client.records import TrajectoryRecords
from bridge.errors import CorruptMessage, UnknownTrajectory
from bridge.layout import Part
from bridge.wire import Fetch, FetchReply, PageRows

# Every page in flight has a shared-memory buffer (`bridge.transport.shared_memory.BUFFERS`).
_PAGES_AHEAD = 2
_TRAJECTORIES_AHEAD = 2


class _Changed(Exception):
    """A trajectory changed between two of its pages."""


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
        sent: deque[tuple[Fetch, int]] = deque()
        try:
            while True:
                for fetch in islice(coming, _TRAJECTORIES_AHEAD - len(sent)):
                    sent.append((fetch, self.connection.send(fetch)))
                if not sent:
                    return
                try:
                    records: TrajectoryRecords | None = self._one(*sent.popleft())
                except UnknownTrajectory:
                    if not allow_unknown:
                        raise
                    records = None
                yield records
        finally:
            self.connection.cancel(seq for _, seq in sent)

    def rows(self, page: FetchReply, seq: int) -> Iterator[PageRows]:
        """Yield the rows of a page, part by part, as they arrive."""
        for part in Part:
            row_bytes = page.layout.row_bytes(part)
            at, end = 0, len(page.tokens) if row_bytes else 0
            while at < end:
                with self.connection.rows(seq, self.end) as piece:
                    after = at + len(piece.valid)
                    is_next = (piece.part, piece.begin) == (part, at) and after <= end
                    if not is_next or piece.rows.shape[1] != row_bytes:
                        raise CorruptMessage("rows of a page arrived out of order; fetch again")
                    yield piece
                at = after

    def _one(self, fetch: Fetch, first: int) -> TrajectoryRecords:
        """Return the records of a fetch that was sent as request ``first``."""
        while True:
            try:
                return join(self._pages(fetch, first), fetch.stop)
            except _Changed:
                first = self.connection.send(fetch)

    def _pages(self, fetch: Fetch, seq: int) -> Iterator[Page]:
        """Yield the pages of one revision of a trajectory.

        Raises:
            _Changed: the trajectory changed meanwhile.
        """
        sent = deque([(fetch, seq)])
        try:
            first = page = self.connection.receive(seq, FetchReply, self.end)
            stop = first.length if fetch.stop is None else min(fetch.stop, first.length)
            at, step = first.start, len(first.tokens)
            starts = iter(range(at + step, stop, max(1, step)))
            while True:
                for start in islice(starts, _PAGES_AHEAD + 1 - len(sent)):
                    sent.append(self._send(fetch, start, min(stop, start + step)))
                yield Page(page, self.rows(page, sent[0][1]))
                wanted, seq = sent.popleft()
                self.connection.complete(seq)
                at += len(page.tokens)
                # A page through the socket may be shorter than the first one in shared memory.
                if page is not first and wanted.stop is not None and at < wanted.stop:
                    sent.appendleft(self._send(fetch, at, wanted.stop))
                if not sent:
                    return
                page = self.connection.receive(sent[0][1], FetchReply, self.end)
                if page.revision != first.revision:
                    raise _Changed
                if page.start != at or not len(page.tokens):
                    raise CorruptMessage("a page does not continue the one before it; fetch again")
        finally:
            self.connection.cancel(seq for _, seq in sent)

    def _send(self, fetch: Fetch, start: int, stop: int) -> tuple[Fetch, int]:
        wanted = replace(fetch, start=start, stop=stop)
        return wanted, self.connection.send(wanted)
