"""Several bridges: which of them holds what.

Every trajectory has a home among the bridges, by a hash of its name. A row is sent once, to the
home of the trajectory that it was computed for, and its number says which bridge that is: the
bridge's place in the list stands above the count. A prefix-cache hit may make it part of other
trajectories, whose home is another bridge. So a trajectory is told to its home and to each bridge
that has rows of it, which therefore keeps those as long as the trajectory, and the trainer's client
puts their answers together by (engine, row).

Rollout and trainer name the bridges in the same order; under which addresses does not matter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from bridge.transport.endpoints import DEFAULT_PORT, InvalidEndpoint, dialled_endpoint

Rows = TypeVar("Rows", int, NDArray[np.int64])

MOST_BRIDGES = 64
# An engine at a million rows a second counts so far in nine years.
_COUNT_BITS = 48


class InvalidEndpoints(InvalidEndpoint):
    """A text does not name bridges."""


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of a comma-separated list.

    Raises:
        InvalidEndpoints: there are none, too many, or one of them twice.
        InvalidEndpoint: one of them cannot be connected to.
    """
    endpoints = tuple(item.strip() for item in text.split(","))
    if not all(endpoints) or len(endpoints) > MOST_BRIDGES:
        raise InvalidEndpoints(
            f"{text!r} names no bridges; give 1 to {MOST_BRIDGES} endpoints such as "
            f"tcp://HOST:{DEFAULT_PORT}, separated by commas"
        )
    if len(set(endpoints)) < len(endpoints):
        raise InvalidEndpoints(f"{text!r} names a bridge twice; give every bridge once")
    return tuple(dialled_endpoint(endpoint) for endpoint in endpoints)


@lru_cache(maxsize=1 << 16)
def home_of(trajectory: str, bridges: int) -> int:
    """Return which of so many bridges is the trajectory's home."""
    return xxh3_64_intdigest(trajectory.encode("utf-8", "surrogatepass")) % bridges


def row_number(count: int, home: int) -> int:
    """Return the number of the engine's row ``count`` whose home is the bridge ``home``."""
    return home << _COUNT_BITS | count


def homes_of(rows: Rows) -> Rows:
    """Return the place in the list of the bridge to which rows are sent; -1 stays -1."""
    return rows >> _COUNT_BITS


def counts_of(rows: Rows) -> Rows:
    """Return the engine's counts of rows."""
    return rows & ((1 << _COUNT_BITS) - 1)
