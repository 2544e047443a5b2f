"""The status document as Prometheus metrics; docs/observability.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from bridge.layout import Part
from bridge.observe.histogram import Histogram
from bridge.observe.status import Status
from bridge.plain import plain

Name = TypeVar("Name", bound=str)

_PREFIX = "trace_bridge_"


def registry(status: Callable[[], Status]) -> CollectorRegistry:
    """Return a registry of the bridge's metrics and those of its process (CPU, memory, files)."""
    collected = CollectorRegistry()
    collected.register(_StatusCollector(status))
    ProcessCollector(registry=collected)
    return collected


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        held = status.held
        yield InfoMetricFamily(
            _PREFIX.rstrip("_"),
            "Which bridge this is",
            {"endpoint": status.endpoint, "store": held.store},
        )
        yield _gauge(
            "status_age_seconds",
            "Age of these numbers; above 2 s the daemon is busy with one task",
            status.age_s,
        )
        yield from _traffic(status)
        yield from _store(status)
        yield from _messages(status)
        yield from _trajectories(status)
        yield from _engines(status)


def _traffic(status: Status) -> Iterator[Metric]:
    held = {Part.FORWARD: status.held.forward_rows, Part.KV: status.held.kv_rows}
    yield _gauges("held_rows", "Complete rows in the store", "part", held)
    yield _gauge(
        "partial_rows", "Rows that some ranks of an engine have not sent", status.held.partial_rows
    )
    yield _counters("received_rows", "Rows stored and acknowledged", "part", status.rows_received)
    yield _counters("received_bytes", "Record bytes of these rows", "part", status.bytes_received)
    yield _counters("sent_rows", "Rows sent to trainers", "part", status.rows_sent)
    yield _counters("sent_bytes", "Record bytes of these rows", "part", status.bytes_sent)
    waiting = status.waiting
    yield _gauge("unacknowledged_rows", "Rows received but not acknowledged", waiting.rows)
    yield _gauge("unacknowledged_bytes", "Record bytes of these rows", waiting.nbytes)
    yield _gauge(
        "unacknowledged_oldest_seconds",
        "Age of the oldest unacknowledged message",
        waiting.oldest_s,
    )
    yield _histogram(
        "ack_latency_seconds", "From receiving a message to its ack", status.ack_latency
    )


def _store(status: Status) -> Iterator[Metric]:
    held = status.held
    used = {
        "memory": held.memory_bytes,
        "index": held.index_bytes,
        "disk": held.disk_bytes,
        "pool": held.pool_bytes,
    }
    yield _gauges("tier_bytes", "Bytes in use; the index is in memory", "tier", used)
    limits = {"memory": held.memory_limit, "disk": held.disk_limit}
    yield _gauges("tier_limit_bytes", "Maximum bytes; 0: no such tier", "tier", limits)
    yield _gauge("store_full", "1 while records are refused for lack of room", held.full)
    yield _gauge("store_failing", "1 while the disk cannot be written to", held.failing)
    yield _counter("commits", "Writes to the store", held.commits)
    yield _counter("corrupt_rows", "Rows that failed their checksum when read", held.corrupt_rows)
    yield _gauge("damaged_entries", "Journal entries unreadable at start", held.damaged_entries)


def _messages(status: Status) -> Iterator[Metric]:
    held = status.held
    yield _counter("messages", "Messages of engines and steps accepted", held.messages)
    yield _counter("duplicate_messages", "Repeated messages", held.duplicates)
    yield _counters("refused_messages", "Messages answered with an error", "reason", status.refused)
    yield _counter("refused_connections", "Connections without a known key", held.refused_peers)


def _trajectories(status: Status) -> Iterator[Metric]:
    yield _gauge("step", "The RL step", status.held.step)
    yield _gauges("trajectories", "Trajectories held, by state", "state", status.trajectories)
    yield _counters(
        "collected_trajectories",
        "Trajectories removed, by their state; open: expired before they finished",
        "state",
        status.collected,
    )


def _engines(status: Status) -> Iterator[Metric]:
    dropped = {_label(engine.engine): engine.dropped_rows for engine in status.engines}
    yield _counters("dropped_rows", "Rows that engines dropped", "engine", dropped)
    seen = {
        _label(engine.engine): status.taken_at - engine.idle_s
        for engine in status.engines
        if engine.idle_s is not None
    }
    yield _gauges("engine_last_seen_timestamp_seconds", "Time of its last message", "engine", seen)


def _label(name: str) -> str:
    """Return an engine name as a label value; different names give different values."""
    return plain(name.replace("\\", "\\\\"))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value)


def _gauges(name: str, text: str, label: str, values: Mapping[Name, float]) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[Name, float]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    bounds = [*(str(bound) for bound in histogram.bounds_s), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(_PREFIX + name, text, buckets, histogram.sum_s)
