"""How far RL steps and weight versions are behind, also when they jump, repeat or go back.

A step or version is behind by the smaller of two distances: to the largest number, and the way that
was gone since it was used last. The first one lets a late message of a slow engine age nothing; the
second one is what counts after a trainer has gone back to an earlier checkpoint, whose numbers are
small and whose records are new. A jump of more than `LARGEST_JUMP` is a mistake or another run and
counts as one: a number far from all others makes nothing old.
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
        """Make again what gave a snapshot."""
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
        """Note that a number is used now."""
        if number != self._newest:
            self._order.pop(number, None)
            self._order[number] = None
            self._newest = number

    def before_newest(self) -> int | None:
        """Return the number that was used last before the newest one, None if there is none."""
        latest = reversed(self._order)
        next(latest, None)
        return next(latest, None)

    def keep(self, numbers: Set[int]) -> None:
        """Forget all others but the two used last."""
        kept = numbers | set(list(self._order)[-2:])
        self._order = {number: None for number in self._order if number in kept}


def ages(values: Sequence[int]) -> list[int]:
    """Return how far each value is behind; they stand in the order of their last use."""
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
    """Return the ends of the stretch without large jumps that the value used last stands in."""
    ordered = sorted(values)
    at = ordered.index(values[-1])
    low = high = at
    while high + 1 < len(ordered) and ordered[high + 1] - ordered[high] <= LARGEST_JUMP:
        high += 1
    while low > 0 and ordered[low] - ordered[low - 1] <= LARGEST_JUMP:
        low -= 1
    return ordered[low], ordered[high]
