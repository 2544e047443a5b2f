"""What a micro-batch's guidance did, read once after its forward.

Counts are in values (elements of the rounded tensors; expert slots for routes), those of scales in
blocks of 16 values, so the counts of the ranks of one model add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from operator import add
from typing import Any

from bridge.layout import Site


@dataclass(frozen=True)
class SiteCount:
    """The counts of one site in one layer, or of several taken together.

    guided            values rounded under a record's guidance
    missing           values that should have been guided but have no record
    compared          values whose full code word is known
    agree_used        of those, how many the forward gave the rollout's code word
    agree_nearest     of those, how many round-to-nearest at the trainer's own scale would have
    adjacent_nearest  of those, how many round-to-nearest misses by one code word
    read_scales       block scales read from the low 2 bits of their code
    ambiguous_scales  of those, how many are two codes or more from the trainer's own, where two
                      codes are equally near
    checked_scales    of those read, how many the record holds whole as well
    wrong_scales      of those checked, how many were read as another code than the rollout's
    silent_scales     of those wrong, how many did not count as ambiguous
    """

    guided: int = 0
    missing: int = 0
    compared: int = 0
    agree_used: int = 0
    agree_nearest: int = 0
    adjacent_nearest: int = 0
    read_scales: int = 0
    ambiguous_scales: int = 0
    checked_scales: int = 0
    wrong_scales: int = 0
    silent_scales: int = 0

    def __add__(self, other: SiteCount) -> SiteCount:
        return SiteCount(*map(add, astuple(self), astuple(other)))

    @property
    def agreement_used(self) -> float | None:
        """The share of compared values whose code word was the rollout's; None if none was."""
        return self.agree_used / self.compared if self.compared else None

    @property
    def agreement_nearest(self) -> float | None:
        """The same share for round-to-nearest at the trainer's own scale."""
        return self.agree_nearest / self.compared if self.compared else None

    @property
    def adjacent_share(self) -> float | None:
        """The share of round-to-nearest's mismatches that are one adjacent code word."""
        mismatches = self.compared - self.agree_nearest
        return self.adjacent_nearest / mismatches if mismatches else None

    @property
    def ambiguous_share(self) -> float | None:
        """The share of scales read from low bits that are ambiguous; None if none was read."""
        return self.ambiguous_scales / self.read_scales if self.read_scales else None

    @property
    def wrong_share(self) -> float | None:
        """The share of checked scales that were read as another code; None if none was checked."""
        return self.wrong_scales / self.checked_scales if self.checked_scales else None


@dataclass(frozen=True)
class Report:
    """Counts by site and layer. Reports add up, over micro-batches or ranks."""

    counts: dict[tuple[Site, int], SiteCount]

    def total(
        self, sites: Iterable[Site] | None = None, layers: Iterable[int] | None = None
    ) -> SiteCount:
        """Return the counts of these sites and layers together; None takes the quantized sites."""
        chosen = set(Site) - {Site.ROUTES} if sites is None else {Site(site) for site in sites}
        kept = None if layers is None else set(layers)
        picked = (
            count
            for (site, layer), count in self.counts.items()
            if site in chosen and (kept is None or layer in kept)
        )
        return sum(picked, SiteCount())

    def to_dict(self) -> dict[str, Any]:
        """Return all counts by site and layer, and their sums, for JSON."""
        return {
            "total": asdict(self.total()),
            "sites": [
                {"site": str(site), "layer": layer, **asdict(count)}
                for (site, layer), count in sorted(self.counts.items())
            ],
        }

    def __add__(self, other: Report) -> Report:
        keys = sorted(self.counts.keys() | other.counts.keys())
        empty = SiteCount()
        return Report(
            {key: self.counts.get(key, empty) + other.counts.get(key, empty) for key in keys}
        )
