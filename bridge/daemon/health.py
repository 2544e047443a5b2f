"""Whether the store takes records, and if not why and since when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from bridge.errors import StoreFailing, StoreFull


class StoreState(StrEnum):
    """``full`` wants room, ``failing`` a disk that can be written to; both are tried again."""

    OK = "ok"
    FULL = "full"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """What the last write came to; ``reason`` is a sentence, ``since`` monotonic seconds."""

    state: StoreState = StoreState.OK
    reason: str = ""
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: StoreFull) -> Self:
        """Return the state that a refusal tells of."""
        failing = isinstance(error, StoreFailing)
        return cls(StoreState.FAILING if failing else StoreState.FULL, str(error))

    def lasting(self, before: StoreHealth) -> StoreHealth:
        """Return this state, since then if it was the state before too."""
        return replace(self, since=before.since) if before.state is self.state else self
