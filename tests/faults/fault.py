"""A fault, and one repetition of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.engine import Stream
from tests.faults.expected import Expected
from tests.faults.trainer import Reading

_ROWS = 400
_DEADLINE_S = 120.0
SEEDS_OF_A_FAULT = 1000


@dataclass(frozen=True, slots=True)
class Repetition:
    """Everything that one repetition chooses comes from ``seed``; the kernel's timing does not.

    Attributes:
        seed: of all choices.
        folder: its own, empty.
        setting: what the repetitions of the fault share, such as a daemon.
        stop_s: how long a peer is stopped.
        end: monotonic time at which a wait has become a hang.
    """

    seed: int
    folder: Path
    setting: Any
    stop_s: float
    end: float

    @classmethod
    def begin(cls, seed: int, folder: Path, setting: Any, stop_s: float) -> Repetition:
        """Start the clock."""
        folder.mkdir(parents=True)
        return cls(seed, folder, setting, stop_s, time.monotonic() + _DEADLINE_S + stop_s)

    @property
    def number(self) -> int:
        """Which of the fault's repetitions this is, from 0 on."""
        return self.seed % SEEDS_OF_A_FAULT

    @property
    def rng(self) -> np.random.Generator:
        """The same choices at every call."""
        return np.random.default_rng(self.seed)

    def stream(self, endpoint: str, rows: int = _ROWS, **options: Any) -> Stream:
        """Return what this repetition's engine does."""
        journal = self.folder / "journal"
        return Stream(
            endpoint, Expected(f"engine-{self.seed}", rows), journal, self.seed, **options
        )

    def reading(self, endpoint: str, expected: Expected, **options: Any) -> Reading:
        """Return what this repetition's trainer does."""
        return Reading(endpoint, expected, self.folder / "report", self.seed, **options)


@contextmanager
def nothing(_folder: Path) -> Iterator[None]:
    """Share nothing."""
    yield None


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table.

    Attributes:
        name: of the row.
        tier: where the daemon keeps records.
        run: a repetition; returns an Outcome, raises Hang.
        setting: what all repetitions share; it is given a folder.
        side_by_side: repetitions at a time.
        share: of the repetitions asked for that are made.
        missing: what this machine lacks to run it, empty if nothing.
        promise: what is stated of it beyond nothing lost, wrong or hanging.
    """

    name: str
    tier: str
    run: Callable[[Repetition], Any]
    setting: Callable[[Path], AbstractContextManager[Any]] = nothing
    side_by_side: int = 2
    share: float = 1.0
    missing: Callable[[], str] = str
    promise: str = ""
