"""The wall clock jumps by up to ten years, either way, while engine and daemon work.

`wall_clock.c` moves it for the processes of the repetition alone. It does not move what the kernel
compares absolute times with, so a wait for a wall clock time would hang here for years.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from bridge.client.connection import Connection
from bridge.observe.status import from_json
from bridge.wire import Observe, ObserveReply
from tests.faults import engine
from tests.faults.fault import Fault, Repetition
from tests.faults.killed import finish, wait_for_some
from tests.faults.outcome import Outcome
from tests.faults.processes import Bridge, asking, running
from tests.faults.verifier import verify

_SOURCE = Path(__file__).with_name("wall_clock.c")
_TEN_YEARS_S = 10 * 365 * 86400
# Far less than any jump: what is given up for its age was given up for the jump.
_EXPIRE_S = 600


@dataclass(slots=True)
class MovedClock:
    """The clock of a daemon and its engines."""

    bridge: Bridge
    file: Path
    moving: threading.Lock = field(default_factory=threading.Lock)

    def jump(self, moved_s: int, end: float) -> Outcome:
        """Move the clock, and make sure that the daemon's has moved."""
        with self.moving:
            # In place: the file is mapped.
            with self.file.open("r+b") as file:
                file.write(struct.pack("=q", moved_s))
            with closing(Connection(self.bridge.endpoint)) as connection:
                told = connection.ask(Observe(), ObserveReply, end)
            error_s = from_json(told.document).taken_at - time.time() - moved_s
        return Outcome(reports=[f"the clock is off by {error_s} s"] if abs(error_s) > 60 else [])


@contextmanager
def moved(folder: Path, directory: Path | None) -> Iterator[MovedClock]:
    """Give a daemon whose clock, as that of all processes started meanwhile, can be moved."""
    folder.mkdir(parents=True)
    library, file = folder / "wall_clock.so", folder / "moved"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    file.write_bytes(struct.pack("=q", 0))
    with (
        patch.dict(os.environ, LD_PRELOAD=str(library), WALL_CLOCK=str(file)),
        closing(Bridge(directory, expire_s=_EXPIRE_S)) as bridge,
    ):
        yield MovedClock(bridge, file)


@contextmanager
def moved_on_disk(folder: Path) -> Iterator[MovedClock]:
    """See moved."""
    with moved(folder, folder / "store") as clock:
        yield clock


@contextmanager
def moved_in_memory(folder: Path) -> Iterator[MovedClock]:
    """See moved."""
    with moved(folder, None) as clock:
        yield clock


def clock_jumps(repetition: Repetition) -> Outcome:
    """Two jumps; nothing expires early, nothing waits for the old time to come back."""
    clock: MovedClock = repetition.setting
    stream = repetition.stream(clock.bridge.endpoint)
    first, second = repetition.rng.integers(-_TEN_YEARS_S, _TEN_YEARS_S, 2).tolist()
    with running(engine.run, stream, fresh=True) as process:
        wait_for_some(repetition, stream)
        met = process.is_alive()
        outcome = clock.jump(first, repetition.end)
        time.sleep(repetition.rng.uniform(0.0, 0.2))
        outcome += clock.jump(second, repetition.end)
        outcome += finish(repetition, process, stream)
    with asking(clock.bridge.endpoint, repetition.end) as client:
        return outcome + verify(client, stream) + Outcome(met=met)


def cannot_compile() -> str:
    """Say why the clock cannot be moved here, empty if it can."""
    return "" if shutil.which("gcc") else "needs gcc to build wall_clock.c"


FAULTS = tuple(
    Fault("wall clock jumps by years", tier, clock_jumps, setting, 4, missing=cannot_compile)
    for tier, setting in (("disk", moved_on_disk), ("memory", moved_in_memory))
)
