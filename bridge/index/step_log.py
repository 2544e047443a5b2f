"""The RL steps that a trainer has begun, and their store entries."""

from __future__ import annotations

from collections.abc import Set
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.index.aging import LARGEST_JUMP, LastUsed, ages
from bridge.index.tables.saved import Saved, Snapshot, table

_STEP_BYTES = 200


class StepLog:
    """``current`` is the step that began last; a trainer may go back to an earlier one."""

    def __init__(self) -> None:
        self.current = 0
        self._used = LastUsed()
        self._used.use(0)
        self._begun: list[tuple[int, int]] = []

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps; rows of ``begun`` are (step, store entry)."""
        used, begun = self._used.snapshot(), table(self._begun, 2)
        return {"current": self.current, "used": used, "begun": begun}

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Return the step log of a snapshot."""
        made = cls()
        made.current = saved.integer("current")
        made._used = LastUsed.restore(saved.integers("used"))
        made._begun = [(step, entry) for step, entry in saved.table("begun", 2).tolist()]
        return made

    def has_begun(self, step: int) -> bool:
        """Whether the step is current, or is the previous one and its message is late.

        If a trainer goes back by one step, its new records count to the later step, whose records
        are kept at least as long.
        """
        is_late = 0 < self.current - step <= LARGEST_JUMP and step == self._used.before_newest()
        return step == self.current or is_late

    def begin(self, step: int, entry: int) -> None:
        """Record that a step has begun, with its store entry."""
        self.current = step
        self._used.use(step)
        self._begun.append((step, entry))

    def behind(self, minimum: int) -> Set[int]:
        """Return the steps of age ``minimum`` or more."""
        steps = list(self._used)
        return {step for step, age in zip(steps, ages(steps), strict=True) if age >= minimum}

    def keep(self, steps: Set[int], held: NDArray[np.int64]) -> list[int]:
        """Forget all steps except these and the newest; return the entries no longer needed.

        A step's entry is needed if it is the last one of a kept step, or if ``held`` (ascending
        entry numbers) has an entry between it and the next step's: that entry belongs to the step.
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
        """Return the approximate bytes of the step log."""
        return _STEP_BYTES * (len(self._used) + len(self._begun))
