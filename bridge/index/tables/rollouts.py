"""The rollouts of a trajectory, independent of the order in which messages arrive.

A rollout is one request of an engine, which numbers its requests upwards from 1. A rollout either
replaces the trajectory of its name or continues it. A trajectory therefore consists of the last
rollout that replaced it and of the rollouts that continued it since.

Engines do not know each other's numbers. If two engines replace a trajectory, the order of arrival
decides. After that only higher numbers of the replaced engine count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import NamedTuple, Self


class Fate(Enum):
    """What to do with a message of a rollout."""

    MERGE = auto()
    """The message belongs to the current rollouts."""
    REPLACE = auto()
    """The message replaces the trajectory."""
    BEGIN_BELOW = auto()
    """The message replaces the trajectory, but later rollouts that continue it came first."""
    SUPERSEDED = auto()
    """The message belongs to a replaced rollout."""


class _Of(NamedTuple):
    """Rollouts of one engine.

    All up to ``replaced`` are replaced, ``begun`` replaced the trajectory, ``highest`` is the
    newest; ``entry`` is the store entry of the newest one's last message.
    """

    replaced: int = 0
    begun: int = 0
    highest: int = 0
    entry: int = -1


_NONE = _Of()
ROLLOUT_COLUMNS = 1 + len(_NONE)


class Rollouts:
    """The rollouts of each engine.

    Rollout 0 is a message of an engine that does not number its requests; it always merges.
    """

    def __init__(self) -> None:
        self._engines: dict[int, _Of] = {}

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Yield what a checkpoint keeps: rows of (engine, replaced, begun, highest, entry)."""
        return ((engine, *known) for engine, known in self._engines.items())

    @classmethod
    def restore(cls, rows: Iterable[list[int]]) -> Self:
        """Return the rollouts of `rows`."""
        made = cls()
        made._engines = {engine: _Of(*known) for engine, *known in rows}
        return made

    def __len__(self) -> int:
        return len(self._engines)

    def fate(self, engine: int, rollout: int, continues: bool) -> Fate:
        """Return the fate of a message; call it before `note`."""
        known = self._engines.get(engine, _NONE)
        if not rollout:
            return Fate.MERGE
        if rollout <= known.replaced:
            return Fate.SUPERSEDED
        if continues or rollout == known.begun:
            return Fate.MERGE
        return Fate.BEGIN_BELOW if rollout < known.highest else Fate.REPLACE

    def note(self, engine: int, rollout: int, fate: Fate, entry: int) -> set[int]:
        """Record a message, which is store entry ``entry``; return the entries still needed.

        These are the last entries of the other engines. Without them a restart would not know that
        the rollouts were replaced.
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
