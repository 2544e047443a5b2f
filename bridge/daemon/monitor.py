"""Builds the status document in the daemon's thread, once per second and on request."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from bridge.daemon.counters import Counters
from bridge.daemon.ingest import Ingest
from bridge.daemon.queries import AdminQueries
from bridge.index import Catalog, Engine
from bridge.layout import Part
from bridge.observe.status import EngineStatus, Sample, Status, StoreStatus

_PERIOD_S = 1.0
_SAMPLES = 120


class Monitor:
    """Keeps the newest document, which is immutable, for other threads."""

    def __init__(
        self,
        endpoint: str,
        queries: AdminQueries,
        catalog: Catalog,
        ingest: Ingest,
        counters: Counters,
    ) -> None:
        self._endpoint = endpoint
        self._queries = queries
        self._catalog = catalog
        self._ingest = ingest
        self._counters = counters
        self._started_at = self._ticked_at = time.monotonic()
        self._history: tuple[Sample, ...] = ()
        self._renew()

    def tick(self) -> None:
        """Renew the document if it is one second old."""
        now = time.monotonic()
        if now - self._ticked_at >= _PERIOD_S:
            self._ticked_at = now
            self._renew()

    def newest(self) -> Status:
        """Return the newest document with the rows that wait now; any thread may call it."""
        newest, taken_at = self._newest
        now = time.monotonic()
        return replace(newest, waiting=self._ingest.waiting(now), age_s=now - taken_at)

    def take(self) -> Status:
        """Return a document of the current state."""
        counters, held, now = self._counters, self._queries.stats(), time.monotonic()
        health = self._ingest.health
        engines = tuple(self._engine(engine, now) for engine in self._catalog.engine_list)
        sample = Sample(
            at=now - self._started_at,
            rows_in=counters.rows_received.total(),
            bytes_in=counters.bytes_received.total(),
            rows_out=counters.rows_sent.total(),
            bytes_out=counters.bytes_sent.total(),
            dropped_rows=held.dropped_rows,
            acks=counters.ack_latency.count,
            ack_s=counters.ack_latency.sum_s,
        )
        return Status(
            endpoint=self._endpoint,
            pid=os.getpid(),
            taken_at=time.time(),
            uptime_s=now - self._started_at,
            held=held,
            rows_received={part: counters.rows_received[part] for part in Part},
            bytes_received={part: counters.bytes_received[part] for part in Part},
            rows_sent={part: counters.rows_sent[part] for part in Part},
            bytes_sent={part: counters.bytes_sent[part] for part in Part},
            refused=dict(counters.refused),
            waiting=self._ingest.waiting(now),
            ack_latency=counters.ack_latency.histogram(),
            trajectories=dict(self._catalog.states),
            collected=dict(self._catalog.collected),
            engines=engines,
            history=(*self._history[1 - _SAMPLES :], sample),
            store=StoreStatus(health.state, health.reason, now - health.since),
        )

    def _renew(self) -> None:
        status = self.take()
        self._newest = status, time.monotonic()
        self._history = status.history

    def _engine(self, engine: Engine, now: float) -> EngineStatus:
        name = engine.hello.engine_id
        seen = self._counters.last_seen.get(name)
        return EngineStatus(
            engine=name,
            idle_s=None if seen is None else now - seen,
            forward_rows=engine.maps[Part.FORWARD].rows,
            kv_rows=engine.maps[Part.KV].rows,
            dropped_rows=engine.dropped_rows,
        )
