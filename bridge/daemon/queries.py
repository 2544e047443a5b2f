"""Answers to requests for lists, digests and counters."""

from __future__ import annotations

from bridge.daemon.authenticator import Authenticator
from bridge.daemon.counters import Counters
from bridge.daemon.fetch.gather import Gather
from bridge.daemon.health import StoreState
from bridge.daemon.ingest import Ingest
from bridge.daemon.retention import Retention
from bridge.index import Catalog
from bridge.index.summary import summarize
from bridge.layout import Part
from bridge.store import Store
from bridge.wire import Digests, DigestsReply, List, ListReply, StatsReply

_LIST_PAGE = 1000


class AdminQueries:
    """Answers List, Digests and Stats messages."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        ingest: Ingest,
        gather: Gather,
        retention: Retention,
        counters: Counters,
        damaged_entries: int,
        authenticator: Authenticator | None,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._ingest = ingest
        self._gather = gather
        self._retention = retention
        self._counters = counters
        self._damaged_entries = damaged_entries
        self._authenticator = authenticator

    def list(self, asked: List) -> ListReply:
        """Return one page of summaries, in the order in which the trajectories began."""
        names = [name for name in self._catalog.trajectories if name.startswith(asked.prefix)]
        stop = asked.after + _LIST_PAGE
        page = tuple(summarize(self._catalog, name) for name in names[asked.after : stop])
        return ListReply(page, stop if stop < len(names) else None)

    def digests(self, asked: Digests) -> DigestsReply:
        """Return the digests of a weight version by engine."""
        return DigestsReply(self._catalog.digests.get(asked.weight_version))

    def stats(self) -> StatsReply:
        """Return the counters."""
        usage = self._store.usage()
        return StatsReply(
            store=self._store.tier,
            memory_bytes=usage.memory_bytes,
            index_bytes=self._catalog.nbytes(),
            memory_limit=usage.memory_limit,
            disk_bytes=usage.disk_bytes,
            disk_limit=usage.disk_limit,
            pool_bytes=usage.pool_bytes,
            full=int(self._ingest.health.state is StoreState.FULL),
            step=self._catalog.step,
            engines=len(self._catalog.engines),
            trajectories=len(self._catalog.trajectories),
            forward_rows=self._catalog.rows(Part.FORWARD),
            kv_rows=self._catalog.rows(Part.KV),
            partial_rows=self._catalog.partial_rows(),
            dropped_rows=sum(engine.dropped_rows for engine in self._catalog.engine_list),
            collected=self._retention.collected,
            messages=self._ingest.accepted,
            commits=self._ingest.commits,
            duplicates=self._ingest.duplicates,
            refused=self._counters.refused.total(),
            refused_peers=0 if self._authenticator is None else self._authenticator.refused,
            corrupt_rows=self._gather.corrupt_rows,
            damaged_entries=self._damaged_entries,
            failing=int(self._ingest.health.state is StoreState.FAILING),
        )
