"""Walk an array by equal keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


def groups(keys_N: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield (key, the indices that hold it) for every distinct key of an integer array [N]."""
    if len(keys_N) == 0:
        return
    order = np.argsort(keys_N, kind="stable")
    sorted_keys = keys_N[order]
    starts = np.flatnonzero(np.diff(sorted_keys)) + 1
    bounds = [0, *starts.tolist(), len(order)]
    for begin, end in pairwise(bounds):
        yield int(sorted_keys[begin]), order[begin:end]
