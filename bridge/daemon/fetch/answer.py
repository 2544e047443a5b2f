"""Answer a Fetch: find the rows of a page of a trajectory, and read them.

Shape legend: T = positions of the page, P = positions of a chunk of it, N = those of T whose
engine's ranks share rows, W = bytes of a row of the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bridge.daemon.fetch.gather import CHUNK_BYTES, SHM_CHUNK_BYTES, Gather
from bridge.daemon.fetch.rank_join import Joining, Shares
from bridge.daemon.fetch.shm_writer import ShmWriter
from bridge.daemon.memory.budget import MAX_PAGE_BYTES
from bridge.errors import LayoutError, UnknownTrajectory
from bridge.index import Catalog, Engine, TrajectoryMap
from bridge.index.tables.runs import group_indices
from bridge.layout import Part, RecordLayout, Site, TensorSlice
from bridge.layout.columns import selection
from bridge.wire import Fetch, FetchReply, PageRows, ShmPageRows

_LAST_POSITIONS = 1024

# Ascending positions [N] of a page, and the shares of their engine's ranks.
_Shared = tuple[NDArray[np.intp], Shares]


@dataclass(frozen=True, slots=True)
class _Found:
    """Locations of the rows of one part of a page.

    locations  LOCATION [T] of rows that one rank sent whole
    versions   the weight version of every row, int32 [T]
    shared     rows of every engine whose ranks share them
    """

    locations: NDArray[np.void]
    versions: NDArray[np.int32]
    shared: tuple[_Shared, ...]


class Fetching:
    """Answers trainers from the catalog and the store."""

    def __init__(self, catalog: Catalog, gather: Gather) -> None:
        self._catalog = catalog
        self._gather = gather
        self._joining = Joining(catalog.blocks, gather)

    def answer(
        self, fetch: Fetch, writer: ShmWriter | None = None, room: int = MAX_PAGE_BYTES
    ) -> Iterator[FetchReply | PageRows | ShmPageRows]:
        """Yield the first page of [start, stop); the client fetches the next page itself.

        The generator reads rows on demand, so earlier chunks may be in flight meanwhile. A
        ``writer`` with room for one row gets the rows; otherwise the page has at most ``room``
        bytes, or one position.

        Raises:
            UnknownTrajectory: no engine has reported the trajectory.
            LayoutError: the engine does not record a requested layer or site.
        """
        trajectory = self._catalog.trajectories.get(fetch.trajectory)
        if trajectory is None:
            raise UnknownTrajectory(
                f"the bridge holds no trajectory {fetch.trajectory!r}; ask for a name under which "
                "an engine has generated, once it has sent the records"
            )
        engine = self._reference_engine(trajectory)
        reduced = _narrowed(
            engine.hello.layout, fetch.layers, _sites(fetch.sites), fetch.tensor_slice
        )
        stop = len(trajectory) if fetch.stop is None else min(fetch.stop, len(trajectory))
        start = min(fetch.start, stop)
        if writer is not None and writer.nbytes < reduced.bytes_per_token():
            writer = None
        page = _page(start, stop, reduced, writer, room)
        found = {part: self._find(part, trajectory, page, engine) for part in Part}
        yield self._head(fetch.trajectory, page, engine, reduced, found)
        for part in Part:
            yield from self._rows(part, found[part], engine.hello.layout, reduced, writer)

    def _reference_engine(self, trajectory: TrajectoryMap) -> Engine:
        """Return the engine of the reply's layout: the last one that computed a row."""
        # It is usually found at the end, so the start of a long trajectory is not read.
        for end in range(len(trajectory), 0, -_LAST_POSITIONS):
            last = trajectory.engines[max(0, end - _LAST_POSITIONS) : end]
            known = last[last >= 0]
            if len(known):
                return self._catalog.engine_list[int(known[-1])]
        return self._catalog.engine_list[0]

    def _find(
        self, part: Part, trajectory: TrajectoryMap, page: slice, reference: Engine
    ) -> _Found:
        """Find one part; rows of an engine with another format count as missing."""
        locations_T = self._catalog.locations(part, trajectory, page)
        versions_T = self._catalog.blocks.versions(locations_T["block"])
        rows_T, shared = trajectory.rows[page], []
        for number, at in group_indices(trajectory.engines[page]):
            if number < 0:
                continue
            engine = self._catalog.engine_list[number]
            is_like = engine.writes_like(reference)
            if is_like and engine.is_shared:
                shares = self._joining.find(engine, part, rows_T[at])
                shared.append((np.arange(len(rows_T))[at], shares))
            if engine.is_shared or not is_like:
                locations_T["block"][at] = -1
        return _Found(locations_T, versions_T, tuple(shared))

    def _head(
        self,
        name: str,
        page: slice,
        reference: Engine,
        reduced: RecordLayout,
        found: dict[Part, _Found],
    ) -> FetchReply:
        trajectory = self._catalog.trajectories[name]
        # The weight version is that of the forward pass; K/V rows may arrive much later.
        forward, kv = (found[part].versions for part in (Part.FORWARD, Part.KV))
        versions = np.where(forward >= 0, forward, kv)
        version_numbers, versions_T = _occurring(versions)
        engine_numbers, engines_T = _occurring(trajectory.engines[page])
        return FetchReply(
            trajectory=name,
            state=trajectory.state,
            revision=trajectory.revision,
            length=len(trajectory),
            start=page.start,
            layout=reduced,
            kv_scales=reference.hello.kv_scales,
            weight_versions=tuple(self._catalog.weight_versions[each] for each in version_numbers),
            engine_ids=tuple(
                self._catalog.engine_list[each].hello.engine_id for each in engine_numbers
            ),
            tokens=trajectory.tokens[page],
            versions=versions_T,
            engines=engines_T,
            rows=trajectory.rows[page],
            weights=tuple(self._catalog.weights[each] for each in version_numbers),
        )

    def _rows(
        self,
        part: Part,
        found: _Found,
        full: RecordLayout,
        reduced: RecordLayout,
        writer: ShmWriter | None,
    ) -> Iterator[PageRows | ShmPageRows]:
        """Yield the rows of one part in chunks."""
        if found.shared:
            for rows in self._mixed(part, found, full, reduced):
                yield rows if writer is None else writer.take(rows)
            return
        chunk_bytes = None if writer is None else SHM_CHUNK_BYTES
        columns = selection(full, reduced, part)
        for chunk in self._gather.chunks(
            full.row_bytes(part), columns, found.locations, chunk_bytes
        ):
            if writer is None:
                yield PageRows(part, chunk.begin, chunk.valid, chunk.rows())
            else:
                yield writer.put(part, chunk)

    def _mixed(
        self, part: Part, found: _Found, full: RecordLayout, reduced: RecordLayout
    ) -> Iterator[PageRows]:
        """Yield rows of which some are joined from the shares of several ranks."""
        width = reduced.row_bytes(part)
        if width == 0:
            return
        columns = selection(full, reduced, part)
        step = max(1, CHUNK_BYTES // width)
        for begin in range(0, len(found.locations), step):
            locations_P = found.locations[begin : begin + step]
            shared = list(_between(found.shared, begin, begin + step))
            if len(shared) == 1 and len(shared[0][0]) == len(locations_P):
                rows_PW, valid_P = self._joining.rows(shared[0][1], reduced)
            else:
                rows_PW, valid_P = self._gather.rows(full.row_bytes(part), columns, locations_P)
                for at, shares in shared:
                    rows_PW[at], valid_P[at] = self._joining.rows(shares, reduced)
            yield PageRows(part, begin, valid_P, rows_PW if valid_P.all() else rows_PW[valid_P])


def _between(shared: Iterable[_Shared], begin: int, end: int) -> Iterator[_Shared]:
    """Yield the shared rows of positions [begin, end), counted from ``begin``."""
    for at_N, shares in shared:
        first, last = at_N.searchsorted([begin, end]).tolist()
        if first < last:
            yield at_N[first:last] - begin, shares[first:last]


@lru_cache(maxsize=64)
def _narrowed(
    full: RecordLayout,
    layers: tuple[int, ...] | None,
    sites: tuple[Site, ...] | None,
    tensor_slice: TensorSlice,
) -> RecordLayout:
    return full.narrow(layers, sites, tensor_slice)


def _sites(sites: tuple[str, ...] | None) -> tuple[Site, ...] | None:
    try:
        return None if sites is None else tuple(Site(site) for site in sites)
    except ValueError as error:
        raise LayoutError(f"{error}; ask for some of {', '.join(Site)}") from error


def _page(
    start: int,
    stop: int,
    reduced: RecordLayout,
    writer: ShmWriter | None,
    room: int = MAX_PAGE_BYTES,
) -> slice:
    nbytes = min(room, MAX_PAGE_BYTES) if writer is None else writer.nbytes
    positions = max(1, nbytes // (reduced.bytes_per_token() + 32))
    return slice(start, min(stop, start + positions))


def _occurring(numbers_T: NDArray[np.int32]) -> tuple[list[int], NDArray[np.int32]]:
    """Return (the numbers that occur, index into them int32 [T]); -1 stays -1."""
    present = [number for number, _ in group_indices(numbers_T) if number >= 0]
    index_T = np.searchsorted(present, numbers_T).astype(np.int32)
    index_T[numbers_T < 0] = -1
    return present, index_T
