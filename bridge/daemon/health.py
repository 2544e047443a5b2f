"""State of the store: whether it accepts records, and if not, why and since when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from bridge.errors import StoreFailing, StoreFull


class StoreState(StrEnum):
    """``full`` needs space, ``failing`` a writable disk; the daemon tries again in both states."""

    OK = "ok"
    FULL = "full"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """Result of the last write; ``reason`` is an error message, ``since`` in monotonic seconds."""

    state: StoreState = StoreState.OK
    reason: str = ""
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: StoreFull) -> Self:
        """Return the state that an error stands for."""
        failing = isinstance(error, StoreFailing)
        return cls(StoreState.FAILING if failing else StoreState.FULL, str(error))

    def lasting(self, before: StoreHealth) -> StoreHealth:
        """Return this state; it keeps the start time of an equal state before it."""
        return replace(self, since=before.since) if before.state is self.state else self
