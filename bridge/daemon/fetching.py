"""Answer a Fetch: which rows a page of a trajectory consists of, and what they hold.

Shapes: T = positions of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bridge.daemon.gather import Gather
from bridge.daemon.joining import Joining
from bridge.errors import UnknownTrajectory
from bridge.index import Catalog, Engine, TrajectoryMap
from bridge.index.grouping import groups
from bridge.layout import LayoutError, Part, RecordLayout, Site, TensorSlice
from bridge.layout.selection import selection
from bridge.wire import Fetch, FetchReply

MAX_PAGE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _PartOfPage:
    rows: NDArray[np.uint8]
    valid: NDArray[np.bool_]
    versions: NDArray[np.int32]


class Fetching:
    """Answers trainers from the catalog and the store."""

    def __init__(self, catalog: Catalog, gather: Gather) -> None:
        self._catalog = catalog
        self._gather = gather
        self._joining = Joining(catalog.blocks, gather)

    def answer(self, fetch: Fetch) -> FetchReply:
        """Return the first page of [start, stop); the client asks on from where it ends.

        Raises:
            UnknownTrajectory: no engine told of the trajectory.
            LayoutError: a layer or site is asked for that the engine does not record.
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
        return self._page(fetch, trajectory, engine, reduced, _page(start, stop, reduced))

    def _reference_engine(self, trajectory: TrajectoryMap) -> Engine:
        """Return the engine whose layout the reply has: the last one that computed a row."""
        known = trajectory.engines[trajectory.engines >= 0]
        return self._catalog.engine_list[int(known[-1]) if len(known) else 0]

    def _page(
        self,
        fetch: Fetch,
        trajectory: TrajectoryMap,
        reference: Engine,
        reduced: RecordLayout,
        page: slice,
    ) -> FetchReply:
        forward = self._part(Part.FORWARD, trajectory, page, reference, reduced)
        kv = self._part(Part.KV, trajectory, page, reference, reduced)
        # A row's version is the one its forward ran with; its K/V may be sent much later.
        versions = np.where(forward.versions >= 0, forward.versions, kv.versions)
        version_names, versions_T = _table(versions, self._catalog.weight_versions)
        engine_names, engines_T = _table(trajectory.engines[page], list(self._catalog.engines))
        return FetchReply(
            trajectory=fetch.trajectory,
            state=trajectory.state,
            revision=trajectory.revision,
            length=len(trajectory),
            start=page.start,
            layout=reduced,
            kv_scales=reference.hello.kv_scales,
            weight_versions=version_names,
            engine_ids=engine_names,
            tokens=trajectory.tokens[page],
            versions=versions_T,
            engines=engines_T,
            rows=trajectory.rows[page],
            forward_valid=forward.valid,
            kv_valid=kv.valid,
            forward=forward.rows,
            kv=kv.rows,
        )

    def _part(
        self,
        part: Part,
        trajectory: TrajectoryMap,
        page: slice,
        reference: Engine,
        reduced: RecordLayout,
    ) -> _PartOfPage:
        """Gather one part; rows of an engine with another format are missing, not reinterpreted."""
        places_T = self._catalog.places(part, trajectory, page)
        versions_T = self._catalog.blocks.versions(places_T["block"])
        for number in np.unique(trajectory.engines[page]).tolist():
            if number >= 0 and not self._catalog.engine_list[number].writes_like(reference):
                places_T["block"][trajectory.engines[page] == number] = -1
        shared = list(self._shared(trajectory, page, reference))
        for _, at in shared:
            places_T["block"][at] = -1
        full = reference.hello.layout
        columns = selection(full, reduced, part)
        rows, valid = self._gather.rows(full.row_bytes(part), columns, places_T)
        for engine, at in shared:
            numbers = trajectory.rows[page][at]
            rows[at], valid[at] = self._joining.rows(engine, part, numbers, reduced)
        return _PartOfPage(rows, valid, versions_T)

    def _shared(
        self, trajectory: TrajectoryMap, page: slice, reference: Engine
    ) -> Iterator[tuple[Engine, NDArray[np.intp]]]:
        """Yield the engines whose ranks share rows, and where in the page their rows are."""
        for number, at in groups(trajectory.engines[page]):
            engine = self._catalog.engine_list[number]
            if number >= 0 and engine.is_shared and engine.writes_like(reference):
                yield engine, at


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


def _page(start: int, stop: int, reduced: RecordLayout) -> slice:
    positions = max(1, MAX_PAGE_BYTES // (reduced.bytes_per_token() + 32))
    return slice(start, min(stop, start + positions))


def _table(
    numbers_T: NDArray[np.int32], names: Sequence[str]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return (the names that occur, index into them int32 [T]); -1 stays -1."""
    present = np.unique(numbers_T[numbers_T >= 0])
    index_T = np.searchsorted(present, numbers_T).astype(np.int32)
    index_T[numbers_T < 0] = -1
    return tuple(names[number] for number in present.tolist()), index_T
