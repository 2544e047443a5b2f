"""Which rollouts a trajectory consists of, whatever order their messages arrive in.

A rollout is one request of an engine; an engine numbers its requests upwards from 1. A rollout
begins its trajectory anew, and replaces what was recorded under the name, or continues it. So a
trajectory is the last rollout that began anew and those that have continued it since.

Engines do not know of each other's numbers. Which of two engines began anew last is decided by
arrival, and after that only higher numbers of the engine that was replaced count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import NamedTuple, Self


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


class _Of(NamedTuple):
    """Of one engine: up to which rollout all are replaced, which began anew, which is the highest.

    ``entry`` is the store's entry of the last message of the highest.
    """

    replaced: int = 0
    begun: int = 0
    highest: int = 0
    entry: int = -1


_NONE = _Of()
ROLLOUT_COLUMNS = 1 + len(_NONE)


class Rollouts:
    """What is known of each engine's rollouts.

    Number 0 is a message of an engine that does not number its requests: it always merges.
    """

    def __init__(self) -> None:
        self._engines: dict[int, _Of] = {}

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Yield what a checkpoint keeps: an engine and the `ROLLOUT_COLUMNS` - 1 numbers of it."""
        return ((engine, *known) for engine, known in self._engines.items())

    @classmethod
    def restore(cls, rows: Iterable[list[int]]) -> Self:
        """Make again what gave rows."""
        made = cls()
        made._engines = {engine: _Of(*known) for engine, *known in rows}
        return made

    def __len__(self) -> int:
        return len(self._engines)

    def fate(self, engine: int, rollout: int, continues: bool) -> Fate:
        """Return what becomes of a message, before `note`."""
        known = self._engines.get(engine, _NONE)
        if not rollout:
            return Fate.MERGE
        if rollout <= known.replaced:
            return Fate.SUPERSEDED
        if continues or rollout == known.begun:
            return Fate.MERGE
        return Fate.BEGIN_BELOW if rollout < known.highest else Fate.REPLACE

    def note(self, engine: int, rollout: int, fate: Fate, entry: int) -> set[int]:
        """Note a message that is the store's ``entry``; return the entries that are still needed.

        These are the other engines' last ones, without which a restart would not know that they
        were replaced. Only a message that replaces all others makes any of them dispensable.
        """
        if fate in (Fate.REPLACE, Fate.BEGIN_BELOW):
            for other, known in self._engines.items():
                self._engines[other] = known._replace(replaced=known.highest)
            known = self._engines.get(engine, _NONE)
            self._engines[engine] = known._replace(replaced=rollout - 1, begun=rollout)
        if rollout:
            known = self._engines.get(engine, _NONE)
            if rollout >= known.highest:
                self._engines[engine] = known._replace(highest=rollout, entry=entry)
        return {known.entry for other, known in self._engines.items() if other != engine}
