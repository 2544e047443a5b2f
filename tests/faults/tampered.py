"""Messages that arrive truncated, twice, in another order or not at all.

Engine and trainer both speak through what tampers, and what they say is tampered with as are the
answers. TCP alone does none of this: a broken middlebox, a stranger or a lost connection does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from tests.faults import engine, trainer
from tests.faults.connection_proxy import cutting
from tests.faults.fault import Fault, Repetition
from tests.faults.killed import finish, one_in_memory, one_on_disk
from tests.faults.message_proxy import Frames, MakeTamper, tampered
from tests.faults.outcome import Outcome
from tests.faults.processes import Bridge, asking, ended, running, wait_until
from tests.faults.verifier import verify

_CUTS = 6


class Truncated:
    """One message in twelve lacks the end of a frame, or whole frames at its end."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.done = 0

    def __call__(self, frames: Frames) -> list[Frames]:
        if self._rng.random() > 1 / 12:
            return [frames]
        self.done += 1
        at = int(self._rng.integers(len(frames)))
        if at and self._rng.random() < 0.3:
            return [frames[:at]]
        stop = int(self._rng.integers(len(frames[at]))) if frames[at] else 0
        return [[*frames[:at], frames[at][:stop], *frames[at + 1 :]]]

    def rest(self) -> list[Frames]:
        return []


class Duplicated:
    """One message in three comes two to four times."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.done = 0

    def __call__(self, frames: Frames) -> list[Frames]:
        if self._rng.random() > 1 / 3:
            return [frames]
        self.done += 1
        return [frames] * int(self._rng.integers(2, 5))

    def rest(self) -> list[Frames]:
        return []


class Reordered:
    """Up to eight messages are held back and passed on in any order; some come again later."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._held: list[Frames] = []
        self._passed: list[Frames] = []
        self.done = 0

    def __call__(self, frames: Frames) -> list[Frames]:
        self._held.append(frames)
        return self.rest() if len(self._held) >= self._rng.integers(1, 9) else []

    def rest(self) -> list[Frames]:
        order = self._rng.permutation(len(self._held)).tolist()
        self.done += sum(at != place for at, place in enumerate(order))
        shuffled = [self._held[at] for at in order]
        old = [self._passed[int(self._rng.integers(len(self._passed)))]] if self._passed else []
        self._passed = [*self._passed, *shuffled][-32:]
        self._held = []
        return [*old, *shuffled] if shuffled else []


def between(
    repetition: Repetition, in_front: AbstractContextManager[Any], bridge: Bridge
) -> Outcome:
    """Stream and fetch through a proxy; read back through it and directly."""
    with ExitStack() as stack:
        proxy = stack.enter_context(in_front)
        stream = repetition.stream(proxy.endpoint)
        process = stack.enter_context(running(engine.run, stream))
        wait_until(lambda: stream.promises().count, repetition.end, "rows are acknowledged")
        reading = repetition.reading(proxy.endpoint, stream.expected, fetches=3, timeout_s=0.5)
        reader = stack.enter_context(running(trainer.run, reading))
        outcome = finish(repetition, process, stream)
        ended(reader, repetition.end, "the trainer finishes")
        done = trainer.reported(reading)
        if done["fetched"] < 3:
            outcome.reports.append(f"the trainer ended: {dict(done)}")
        outcome += Outcome(compared=done["compared"], wrong=done["wrong"], met=proxy.done > 0)
    with asking(bridge.endpoint, repetition.end) as client:
        return outcome + verify(client, stream)


def _messages(repetition: Repetition, make: MakeTamper) -> Outcome:
    bridge: Bridge = repetition.setting
    return between(repetition, tampered(bridge.endpoint, make, repetition.rng), bridge)


def truncated(repetition: Repetition) -> Outcome:
    """What is truncated is refused and sent again."""
    return _messages(repetition, Truncated)


def duplicated(repetition: Repetition) -> Outcome:
    """What comes twice is held once."""
    return _messages(repetition, Duplicated)


def reordered(repetition: Repetition) -> Outcome:
    """What comes late changes nothing that came before it."""
    return _messages(repetition, Reordered)


def connection_cut(repetition: Repetition) -> Outcome:
    """In the middle of messages; what was on its way is sent again over another connection."""
    bridge: Bridge = repetition.setting
    return between(repetition, cutting(bridge.endpoint, _CUTS, repetition.rng), bridge)


FAULTS = tuple(
    Fault(name, tier, run, setting, side_by_side)
    for name, run, side_by_side in (
        ("truncated messages", truncated, 6),
        ("duplicated messages", duplicated, 6),
        ("reordered messages", reordered, 6),
        ("connections cut within messages", connection_cut, 8),
    )
    for tier, setting in (("disk", one_on_disk), ("memory", one_in_memory))
)
