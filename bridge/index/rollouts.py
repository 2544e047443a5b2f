"""Which rollouts a trajectory consists of, whatever order their messages arrive in.

A rollout is one request of an engine; an engine numbers its requests upwards from 1. A rollout
begins its trajectory anew, and replaces what was recorded under the name, or continues it. So a
trajectory is the last rollout that began anew and those that have continued it since.

Engines do not know of each other's numbers. Which of two engines began anew last is decided by
arrival, and after that only higher numbers of the engine that was replaced count.
"""

from __future__ import annotations

from enum import Enum, auto


class Fate(Enum):
    """What to do with a message of a rollout."""

    MERGE = auto()
    """It belongs to what there is."""
    REPLACE = auto()
    """It begins the trajectory anew."""
    BEGIN_BELOW = auto()
    """It begins anew what later rollouts of its engine, which arrived first, continue."""
    SUPERSEDED = auto()
    """It belongs to a rollout that was replaced."""


class Rollouts:
    """Of each engine: which rollouts are replaced, which one began anew, and the highest.

    Number 0 is a message of an engine that does not number its requests: it always merges.
    """

    def __init__(self) -> None:
        self._replaced: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._highest: dict[int, int] = {}
        self._entries: dict[int, int] = {}

    def fate(self, engine: int, rollout: int, continues: bool) -> Fate:
        """Return what becomes of a message, before `note`."""
        if not rollout:
            return Fate.MERGE
        if rollout <= self._replaced.get(engine, 0):
            return Fate.SUPERSEDED
        if continues or rollout == self._begun.get(engine):
            return Fate.MERGE
        return Fate.BEGIN_BELOW if rollout < self._highest.get(engine, 0) else Fate.REPLACE

    def note(self, engine: int, rollout: int, fate: Fate, entry: int) -> set[int]:
        """Note a message that is the store's ``entry``; return the entries that are still needed.

        These are the other engines' last ones, without which a restart would not know that they
        were replaced. Only a message that replaces all others makes any of them dispensable.
        """
        others = {number: held for number, held in self._entries.items() if number != engine}
        if fate in (Fate.REPLACE, Fate.BEGIN_BELOW):
            for other in others:
                self._replaced[other] = self._highest[other]
            self._replaced[engine] = rollout - 1
            self._begun[engine] = rollout
        if rollout and rollout >= self._highest.get(engine, 0):
            self._highest[engine] = rollout
            self._entries[engine] = entry
        return set(others.values())

    def __len__(self) -> int:
        return len(self._highest)
