"""Several bridges: which bridge of a list holds which rows and trajectories.

Every trajectory has an owner among the bridges, chosen by a hash of its name: its shard, the
bridge's index in the list. An engine sends a row once, to the shard of the trajectory that computed
it, and the row's number contains the shard above the count. After a prefix-cache hit the row may
also belong to trajectories of another shard. So a trajectory is reported to its own shard and to
every shard that has rows of it, which therefore keeps those rows as long as the trajectory. The
trainer's client joins their replies by (engine, row).

Rollout and trainer name the bridges in the same order; their addresses may differ.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from bridge.transport.endpoints import DEFAULT_PORT, InvalidEndpoint, dialled_endpoint

Rows = TypeVar("Rows", int, NDArray[np.int64])

MAX_BRIDGES = 64
# Enough for an engine at a million rows per second for nine years.
_COUNT_BITS = 48


class InvalidEndpoints(InvalidEndpoint):
    """A text is not a list of bridge endpoints."""


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of a comma-separated list.

    Raises:
        InvalidEndpoints: there are none, too many, or one of them twice.
        InvalidEndpoint: one of them cannot be connected to.
    """
    endpoints = tuple(item.strip() for item in text.split(","))
    if not all(endpoints) or len(endpoints) > MAX_BRIDGES:
        raise InvalidEndpoints(
            f"{text!r} names no bridges; give 1 to {MAX_BRIDGES} endpoints such as "
            f"tcp://HOST:{DEFAULT_PORT}, separated by commas"
        )
    if len(set(endpoints)) < len(endpoints):
        raise InvalidEndpoints(f"{text!r} names a bridge twice; give every bridge once")
    return tuple(dialled_endpoint(endpoint) for endpoint in endpoints)


@lru_cache(maxsize=1 << 16)
def shard_of(trajectory: str, bridges: int) -> int:
    """Return the shard of a trajectory: the index of its bridge in a list of ``bridges``."""
    return xxh3_64_intdigest(trajectory.encode("utf-8", "surrogatepass")) % bridges


def row_number(count: int, shard: int) -> int:
    """Return the number of the engine's row ``count`` that belongs to bridge ``shard``."""
    return shard << _COUNT_BITS | count


def shards_of(rows: Rows) -> Rows:
    """Return the shard of each row number; -1 stays -1."""
    return rows >> _COUNT_BITS


def counts_of(rows: Rows) -> Rows:
    """Return the engine's count of each row number."""
    return rows & ((1 << _COUNT_BITS) - 1)
