"""The RL steps that a trainer has begun, and the store's entries that say when."""

from __future__ import annotations

from collections.abc import Set
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.index.aging import LARGEST_JUMP, LastUsed, ages
from bridge.index.tables.saved import Saved, Snapshot, table

_STEP_BYTES = 200


class StepLog:
    """``current`` is the step that was begun last; a trainer may go back to an earlier one."""

    def __init__(self) -> None:
        self.current = 0
        self._used = LastUsed()
        self._used.use(0)
        self._begun: list[tuple[int, int]] = []

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps; ``begun`` has a step and its entry in every row."""
        used, begun = self._used.snapshot(), table(self._begun, 2)
        return {"current": self.current, "used": used, "begun": begun}

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Make again what gave a snapshot."""
        made = cls()
        made.current = saved.integer("current")
        made._used = LastUsed.restore(saved.integers("used"))
        made._begun = [(step, entry) for step, entry in saved.table("begun", 2).tolist()]
        return made

    def has_begun(self, step: int) -> bool:
        """Whether the step is the current one, or the one before it and the message only late.

        What a trainer records after going back by one step counts to the later step, which is kept
        no shorter.
        """
        is_late = 0 < self.current - step <= LARGEST_JUMP and step == self._used.before_newest()
        return step == self.current or is_late

    def begin(self, step: int, entry: int) -> None:
        """Note a step that the store's entry says has begun."""
        self.current = step
        self._used.use(step)
        self._begun.append((step, entry))

    def behind(self, most: int) -> Set[int]:
        """Return the steps that are ``most`` steps or more behind."""
        steps = list(self._used)
        return {step for step, age in zip(steps, ages(steps), strict=True) if age >= most}

    def keep(self, steps: Set[int], held: NDArray[np.int64]) -> list[int]:
        """Forget steps but these and the last ones; return the entries that are not needed.

        An entry is needed while the last one of a step that is kept, or while anything that is
        ``held`` (entries, ascending) was told between it and the next: that belongs to its step.
        """
        self._used.keep(steps)
        last = dict(self._begun)
        ends = held.searchsorted([entry for _, entry in self._begun] + [np.iinfo(np.int64).max])
        kept = [
            (step, entry)
            for at, (step, entry) in enumerate(self._begun)
            if ends[at] < ends[at + 1] or (step in self._used and last[step] == entry)
        ]
        gone = {entry for _, entry in self._begun} - {entry for _, entry in kept}
        self._begun = kept
        return sorted(gone)

    def __len__(self) -> int:
        return len(self._begun)

    def nbytes(self) -> int:
        """Return the memory that the steps take, about."""
        return _STEP_BYTES * (len(self._used) + len(self._begun))
