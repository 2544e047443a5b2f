"""Requests about the daemon's content: trajectories, weight digests, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from bridge.wire.fields import MAX_LIST_ITEMS, MAX_MAP_ITEMS, Count, Name, Names, Text, TextByKey
from bridge.wire.ingest import TrajectoryState
from bridge.wire.message import Message


class List(Message, frozen=True):
    """Request trajectory summaries, from the ``after``-th on, at most one page."""

    KIND: ClassVar[str] = "list"

    after: Count = 0
    prefix: Text = ""


@dataclass(frozen=True, slots=True)
class TrajectorySummary:
    """Counts of a trajectory's records.

    ``rows`` and ``kv_rows`` count positions whose forward and K/V row is held; ``missing_forward``
    and ``missing_kv`` positions that should have such a row and do not (the last token needs none).
    """

    trajectory: Name
    state: TrajectoryState
    tokens: Count
    rows: Count
    kv_rows: Count
    missing_forward: Count
    missing_kv: Count
    weight_versions: Names
    nbytes: Count


class ListReply(Message, frozen=True):
    """One page of summaries; ``next`` is the ``after`` of the next page, None at the end."""

    KIND: ClassVar[str] = "list_reply"

    summaries: Annotated[tuple[TrajectorySummary, ...], Meta(max_length=MAX_LIST_ITEMS)]
    next: Count | None


class Digests(Message, frozen=True):
    """Request the weight digests of a version."""

    KIND: ClassVar[str] = "digests"

    weight_version: Text


class DigestsReply(Message, frozen=True):
    """Digests by engine; the engine that reported last is the last one."""

    KIND: ClassVar[str] = "digests_reply"

    by_engine: Annotated[Mapping[Text, TextByKey], Meta(max_length=MAX_MAP_ITEMS)]


class Stats(Message, frozen=True):
    """Request the daemon's counters."""

    KIND: ClassVar[str] = "stats"


class StatsReply(Message, frozen=True):
    """The daemon's counters; ``store`` names its tiers, memory before disk.

    ``memory_bytes`` counts record bytes in memory and ``index_bytes`` what finds them, together
    under ``memory_limit``; ``disk_bytes`` is under ``disk_limit`` (0: no such tier);
    ``pool_bytes`` lie in a Mooncake pool. ``full`` is 1 while the store refuses records
    for lack of room and ``failing`` is 1 while its disk cannot be written to.
    ``corrupt_rows`` counts rows that failed their checksum when read (they are then missing),
    ``damaged_entries`` journal entries that were not readable at start-up, ``refused`` messages
    answered with an error, ``refused_peers`` connections without a known key,
    ``commits`` writes to the store, ``dropped_rows`` rows that engines dropped, ``collected``
    deleted trajectories, ``partial_rows`` rows of both parts that some ranks of an engine have
    sent and others have not: they are missing until then, and not counted elsewhere.
    """

    KIND: ClassVar[str] = "stats_reply"

    store: Name
    memory_bytes: Count
    index_bytes: Count
    memory_limit: Count
    disk_bytes: Count
    disk_limit: Count
    pool_bytes: Count
    full: Count
    step: Count
    engines: Count
    trajectories: Count
    forward_rows: Count
    kv_rows: Count
    partial_rows: Count
    dropped_rows: Count
    collected: Count
    messages: Count
    commits: Count
    duplicates: Count
    refused: Count
    refused_peers: Count
    corrupt_rows: Count
    damaged_entries: Count
    failing: Count
