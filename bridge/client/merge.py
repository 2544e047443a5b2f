"""Join the replies of several bridges (`bridge.transport.bridge_sharding`).

Shape legend: T = positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from bridge.client.records import TrajectoryRecords
from bridge.errors import MixedWeights
from bridge.transport.bridge_sharding import shard_of, shards_of
from bridge.wire import DigestsReply, GcReply, StatsReply, TrajectorySummary

# Counters that are equal at every bridge, or whose maximum is reported.
_LARGEST = ("step", "engines", "full")


def elsewhere(records: TrajectoryRecords, owner: int) -> dict[int, slice]:
    """Return, for each bridge other than the owner, the positions whose rows it holds."""
    owners_T = np.where(records.missing().numpy(), shards_of(records.rows.numpy()), owner)
    indices = {
        number: np.flatnonzero(owners_T == number) for number in np.unique(owners_T).tolist()
    }
    return {
        number: slice(int(at[0]), int(at[-1]) + 1)
        for number, at in indices.items()
        if number != owner
    }


def completed(records: TrajectoryRecords, other: TrajectoryRecords, at: slice) -> TrajectoryRecords:
    """Return the records with the rows that another bridge has of the positions ``at``.

    Only rows of the same engine and number are taken. Another bridge may have received the
    trajectory's messages in another order, and may hold another computation at a position.
    """
    if other.layout != records.layout or other.kv_scales != records.kv_scales:
        return records
    count = min(len(other), at.stop - at.start)
    here = slice(at.start, at.start + count)
    same_T = other.rows.numpy()[:count] == records.rows.numpy()[here]
    same_T &= _names(other)[:count] == _names(records)[here]
    for name in ("forward", "kv"):
        mine, mine_valid = getattr(records, name), getattr(records, f"{name}_valid")
        theirs, theirs_valid = getattr(other, name), getattr(other, f"{name}_valid")
        taken_T = same_T & theirs_valid.numpy()[:count] & ~mine_valid.numpy()[here]
        mine.numpy()[here][taken_T] = theirs.numpy()[:count][taken_T]
        mine_valid.numpy()[here][taken_T] = True
    return _with_versions(records, other, here, same_T)


def _with_versions(
    records: TrajectoryRecords, other: TrajectoryRecords, here: slice, same_T: NDArray[np.bool_]
) -> TrajectoryRecords:
    """Take the weight versions of positions that have none yet."""
    theirs = _versions(other)
    known = tuple(dict.fromkeys((*_versions(records), *theirs)))
    # Index -1 selects the last entry.
    indices = np.array([*map(known.index, theirs), -1])
    index_T = records.weight_version_index.numpy()[here]
    theirs_T = indices[other.weight_version_index.numpy()[: len(index_T)]]
    unknown_T = same_T & (index_T < 0)
    index_T[unknown_T] = theirs_T[unknown_T]
    labels, digests = ([pair[at] for pair in known] for at in (0, 1))
    return replace(records, weight_versions=tuple(labels), weights=tuple(digests))


def require_one_meaning(records: TrajectoryRecords) -> TrajectoryRecords:
    """Return the records; refuse those in which one label stands for two different weights.

    Raises:
        MixedWeights: the label, and the engines that use it.
    """
    digests: dict[str, str] = {}
    for label, digest in _versions(records):
        if digest and digests.setdefault(label, digest) != digest:
            raise MixedWeights(
                f"trajectory {records.trajectory!r} has rows of two different weights that are "
                f"both called {label!r}, by {' and '.join(records.engine_ids)}; generate it again "
                "under one name on one set of weights, and give every server's weights a name of "
                "their own (--weight-version)"
            )
    return records


def _versions(records: TrajectoryRecords) -> list[tuple[str, str]]:
    """Return (label, digest) of the weights that occur."""
    return list(zip(records.weight_versions, records.weights, strict=True))


def _names(records: TrajectoryRecords) -> NDArray[np.str_]:
    """Return the engine's name at every position, empty where there is none."""
    names = np.array([*records.engine_ids, ""])
    at_T: NDArray[np.str_] = names[records.engine_index.numpy()]
    return at_T


def joined_summaries(replies: Sequence[Sequence[TrajectorySummary]]) -> list[TrajectorySummary]:
    """Return one summary per trajectory: its owner's, plus the rows that other bridges hold.

    ``replies`` are those of all bridges in the order of `bridge.transport.bridge_sharding`.
    """
    reported: dict[str, list[tuple[bool, TrajectorySummary]]] = {}
    for number, reply in enumerate(replies):
        for item in reply:
            is_owner = shard_of(item.trajectory, len(replies)) == number
            reported.setdefault(item.trajectory, []).append((is_owner, item))
    return [_joined_summary(items) for items in reported.values()]


def _joined_summary(items: list[tuple[bool, TrajectorySummary]]) -> TrajectorySummary:
    # An owner that lost the trajectory does not hide what others have.
    (_, owner), *others = sorted(items, key=lambda item: not item[0])
    versions = dict.fromkeys(name for _, item in items for name in item.weight_versions)
    return replace(
        owner,
        rows=sum(item.rows for _, item in items),
        kv_rows=sum(item.kv_rows for _, item in items),
        missing_forward=max(0, owner.missing_forward - sum(item.rows for _, item in others)),
        missing_kv=max(0, owner.missing_kv - sum(item.kv_rows for _, item in others)),
        weight_versions=tuple(versions),
        nbytes=sum(item.nbytes for _, item in items),
    )


def joined_digests(replies: Iterable[DigestsReply]) -> dict[str, dict[str, str]]:
    """Return engine -> tensor name -> digest."""
    joined: dict[str, dict[str, str]] = {}
    for reply in replies:
        for engine, digests in reply.by_engine.items():
            joined[engine] = {**joined.get(engine, {}), **digests}
    return joined


def summed_gc(replies: Sequence[GcReply]) -> GcReply:
    """Return the sum of deletions; a trajectory counts at every bridge that knows it."""
    return GcReply(
        sum(reply.trajectories for reply in replies),
        sum(reply.rows for reply in replies),
        sum(reply.entries for reply in replies),
    )


def summed_stats(replies: Sequence[StatsReply]) -> StatsReply:
    """Return the sum of counters; a trajectory counts at every bridge that knows it."""
    first, *others = replies
    totals = {
        name: (max if name in _LARGEST else sum)([getattr(reply, name) for reply in replies])
        for name in first.__struct_fields__
        if name != "store"
    }
    stores = dict.fromkeys(reply.store for reply in replies)
    return msgspec.structs.replace(first, store=", ".join(stores), **totals) if others else first
