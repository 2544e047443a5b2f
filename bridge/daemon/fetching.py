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
from bridge.errors import UnknownTrajectory
from bridge.index import Catalog, Engine, TrajectoryMap
from bridge.index.grouping import groups
from bridge.layout import LayoutError, Part, RecordLayout, Site
from bridge.wire import Fetch, FetchReply, PageRows

MAX_PAGE_BYTES = 8 << 20
_LAST_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class _Found:
    """Where the rows of one part of a page are, as PLACE [T], and their weight versions [T]."""

    places: NDArray[np.void]
    versions: NDArray[np.int32]


class Fetching:
    """Answers trainers from the catalog and the store."""

    def __init__(self, catalog: Catalog, gather: Gather) -> None:
        self._catalog = catalog
        self._gather = gather

    def answer(self, fetch: Fetch) -> Iterator[FetchReply | PageRows]:
        """Yield the first page of [start, stop); the client asks on from where it ends.

        Its rows are read as they are asked for, so that the pieces before them can be on their way.

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
        reduced = _narrowed(engine.hello.layout, fetch.layers, _sites(fetch.sites))
        stop = len(trajectory) if fetch.stop is None else min(fetch.stop, len(trajectory))
        start = min(fetch.start, stop)
        page = _page(start, stop, reduced)
        found = {part: self._find(part, trajectory, page, engine) for part in Part}
        yield self._head(fetch.trajectory, page, engine, reduced, found)
        full = engine.hello.layout
        for part in Part:
            columns = _selection(full, part, reduced)
            for piece in self._gather.pieces(full.row_bytes(part), columns, found[part].places):
                yield PageRows(part, piece.begin, piece.valid, piece.rows)

    def _reference_engine(self, trajectory: TrajectoryMap) -> Engine:
        """Return the engine whose layout the reply has: the last one that computed a row."""
        # Mostly it is one of the last positions; the first ones of a long trajectory are not read.
        for end in range(len(trajectory), 0, -_LAST_POSITIONS):
            last = trajectory.engines[max(0, end - _LAST_POSITIONS) : end]
            known = last[last >= 0]
            if len(known):
                return self._catalog.engine_list[int(known[-1])]
        return self._catalog.engine_list[0]

    def _find(
        self, part: Part, trajectory: TrajectoryMap, page: slice, reference: Engine
    ) -> _Found:
        """Find one part; rows of an engine with another format are missing, not reinterpreted."""
        places_T = self._catalog.places(part, trajectory, page)
        versions_T = self._catalog.blocks.versions(places_T["block"])
        for number, at in groups(trajectory.engines[page]):
            if number >= 0 and not self._catalog.engine_list[number].writes_like(reference):
                places_T["block"][at] = -1
        return _Found(places_T, versions_T)

    def _head(
        self,
        name: str,
        page: slice,
        reference: Engine,
        reduced: RecordLayout,
        found: dict[Part, _Found],
    ) -> FetchReply:
        trajectory = self._catalog.trajectories[name]
        # A row's version is the one its forward ran with; its K/V may be sent much later.
        forward, kv = (found[part].versions for part in (Part.FORWARD, Part.KV))
        versions = np.where(forward >= 0, forward, kv)
        version_names, versions_T = _table(versions, self._catalog.weight_versions)
        engine_names, engines_T = _table(trajectory.engines[page], list(self._catalog.engines))
        return FetchReply(
            trajectory=name,
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
        )


@lru_cache(maxsize=64)
def _narrowed(
    full: RecordLayout, layers: tuple[int, ...] | None, sites: tuple[Site, ...] | None
) -> RecordLayout:
    return full.narrow(layers, sites)


@lru_cache(maxsize=256)
def _selection(full: RecordLayout, part: Part, reduced: RecordLayout) -> tuple[slice, ...]:
    return full.selection(part, reduced)


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
    present = [number for number, _ in groups(numbers_T) if number >= 0]
    index_T = np.searchsorted(present, numbers_T).astype(np.int32)
    index_T[numbers_T < 0] = -1
    return tuple(names[number] for number in present), index_T
