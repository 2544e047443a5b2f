"""Histogram of durations with fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """``counts[i]`` durations in (bounds_s[i-1], bounds_s[i]]; the last count has no upper end."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    def quantile(self, share: float) -> float | None:
        """Return the upper bound of the bucket at quantile ``share``.

        None without durations; infinity if the quantile is in the last bucket.
        """
        due = share * sum(self.counts)
        if not due:
            return None
        seen = 0
        for bound, count in zip(self.bounds_s, self.counts, strict=False):
            seen += count
            if seen >= due:
                return bound
        return float("inf")


class Durations:
    """Counts durations."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, duration_s: float) -> None:
        """Count one duration."""
        self.count += 1
        self.sum_s += duration_s
        self._counts[bisect_left(BOUNDS_S, duration_s)] += 1

    def histogram(self) -> Histogram:
        """Return the current counts."""
        return Histogram(BOUNDS_S, tuple(self._counts), self.sum_s)
