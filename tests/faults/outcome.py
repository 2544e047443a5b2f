"""What a repetition of a fault came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields


class Hang(Exception):
    """Something that had to happen did not happen before its deadline."""


@dataclass(slots=True)
class Outcome:
    """Rows, but for ``hangs`` and ``reports``.

    Attributes:
        acknowledged: promised to an engine.
        compared: read back and compared byte for byte.
        lost: promised, not promised away by the tier, and missing afterwards.
        wrong: served with other bytes, token, engine or weight version than were recorded.
        forgotten: promised by a daemon that kept them in memory alone, and gone with it.
        met: repetitions in which the fault met work that was under way.
        hangs: what did not happen before its deadline.
        reports: what else went otherwise than stated.
    """

    acknowledged: int = 0
    compared: int = 0
    lost: int = 0
    wrong: int = 0
    forgotten: int = 0
    met: int = 0
    hangs: int = 0
    reports: list[str] = field(default_factory=list)

    @property
    def violated(self) -> bool:
        """Whether anything happened that must not."""
        return bool(self.lost or self.wrong or self.hangs or self.reports)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            *(getattr(self, item.name) + getattr(other, item.name) for item in fields(Outcome))
        )


def total(outcomes: Iterable[Outcome]) -> Outcome:
    """Add outcomes up."""
    return sum(outcomes, Outcome())
