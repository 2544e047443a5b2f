"""What a repetition of a fault came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields


class Hang(Exception):
    """Something that had to happen did not happen before its deadline."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process's own (not of files that the kernel may take back)."""

    peak: int
    limit: int

    @property
    def ratio(self) -> float:
        """Peak over limit."""
        return self.peak / self.limit


@dataclass(slots=True)
class Outcome:
    """Rows, but for the last five.

    Attributes:
        acknowledged: promised to an engine.
        compared: read back and compared byte for byte.
        lost: promised, not promised away by the tier, and missing afterwards.
        wrong: served with other bytes, token, engine or weight version than were recorded.
        forgotten: promised by a daemon that kept them in memory alone, and gone with it.
        refused: stores that a daemon did not open, or wrote to no more, after the fault was over.
        met: repetitions in which the fault met work that was under way.
        hangs: what did not happen before its deadline.
        memory: the fullest of a process's memory, and its limit there.
        reports: what else went otherwise than stated.
    """

    acknowledged: int = 0
    compared: int = 0
    lost: int = 0
    wrong: int = 0
    forgotten: int = 0
    met: int = 0
    refused: int = 0
    hangs: int = 0
    memory: Memory | None = None
    reports: list[str] = field(default_factory=list)

    @property
    def violated(self) -> bool:
        """Whether anything happened that must not."""
        over = self.memory is not None and self.memory.ratio > 1
        return bool(self.lost or self.wrong or self.refused or self.hangs or self.reports or over)

    def __add__(self, other: Outcome) -> Outcome:
        names = [item.name for item in fields(Outcome) if item.name != "memory"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        measured = [one.memory for one in (self, other) if one.memory is not None]
        return Outcome(**sums, memory=max(measured, key=lambda memory: memory.ratio, default=None))


def total(outcomes: Iterable[Outcome]) -> Outcome:
    """Add outcomes up."""
    return sum(outcomes, Outcome())
