"""Group an array by key, and find runs in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


def group_indices(keys_N: NDArray[Any]) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
    """Yield (key, index of its items) for every distinct key of an integer array [N], ascending.

    Most arrays have one key. The function then sorts nothing and yields a slice, which copies
    nothing.
    """
    if len(keys_N) == 0:
        return
    if bool((keys_N == keys_N[0]).all()):
        yield int(keys_N[0]), slice(None)
        return
    order = np.argsort(keys_N, kind="stable")
    sorted_keys = keys_N[order]
    starts = np.flatnonzero(np.diff(sorted_keys)) + 1
    bounds = [0, *starts.tolist(), len(order)]
    for begin, end in pairwise(bounds):
        yield int(sorted_keys[begin]), order[begin:end]


def runs(begins_N: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return (first indices, lengths) of the runs; ``begins_N`` marks where runs begin."""
    begins_N[:1] = True
    firsts = np.flatnonzero(begins_N)
    lengths = np.empty_like(firsts)
    lengths[:-1] = firsts[1:] - firsts[:-1]
    lengths[-1:] = len(begins_N) - firsts[-1:]
    return firsts, lengths
