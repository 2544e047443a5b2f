"""Ages of RL steps and weight versions whose numbers may jump, repeat or go back.

The age is the smaller of two distances: the distance to the largest number, and the sum of all
changes since the last use. The first distance makes a late message of a slow engine age nothing.
The second one counts after a trainer has returned to an earlier checkpoint: its step numbers are
small, but its records are new. A change of more than `LARGEST_JUMP` is a mistake or another run. It
counts as 1, so one number far from all others makes nothing old.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.index.tables.saved import integers

LARGEST_JUMP = 1 << 16


class LastUsed:
    """Numbers in the order of their last use."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}
        self._newest: int | None = None

    def snapshot(self) -> NDArray[np.int64]:
        """Return what a checkpoint keeps: the numbers, the newest last."""
        return integers(self._order)

    @classmethod
    def restore(cls, numbers: Sequence[int]) -> Self:
        """Return the numbers of a snapshot."""
        made = cls()
        for number in numbers:
            made.use(number)
        return made

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, number: int) -> bool:
        return number in self._order

    def use(self, number: int) -> None:
        """Move a number to the end: it is used now."""
        if number != self._newest:
            self._order.pop(number, None)
            self._order[number] = None
            self._newest = number

    def before_newest(self) -> int | None:
        """Return the second newest number, None if there is none."""
        latest = reversed(self._order)
        next(latest, None)
        return next(latest, None)

    def keep(self, numbers: Set[int]) -> None:
        """Forget all numbers except these and the two newest."""
        kept = numbers | set(list(self._order)[-2:])
        self._order = {number: None for number in self._order if number in kept}


def ages(values: Sequence[int]) -> list[int]:
    """Return the age of each value; ``values`` are in the order of their last use."""
    if not values:
        return []
    way = [0]
    for earlier, later in pairwise(reversed(values)):
        way.append(way[-1] + _jump(earlier, later))
    way.reverse()
    lowest, highest = _neighbours(values)
    return [
        min(gone, highest - value) if lowest <= value <= highest else gone
        for gone, value in zip(way, values, strict=True)
    ]


def _jump(one: int, other: int) -> int:
    distance = abs(one - other)
    return distance if distance <= LARGEST_JUMP else 1


def _neighbours(values: Sequence[int]) -> tuple[int, int]:
    """Return (lowest, highest) value that the last value reaches without a large jump."""
    ordered = sorted(values)
    at = ordered.index(values[-1])
    low = high = at
    while high + 1 < len(ordered) and ordered[high + 1] - ordered[high] <= LARGEST_JUMP:
        high += 1
    while low > 0 and ordered[low] - ordered[low - 1] <= LARGEST_JUMP:
        low -= 1
    return ordered[low], ordered[high]
