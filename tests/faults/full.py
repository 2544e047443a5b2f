"""A store without room: a full disk, a limit that is reached, full memory over full scratch.

The disk is a file system in memory of a few MiB, mounted for the repetition and enlarged to end the
fault, so the daemon meets ENOSPC itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

from bridge.client.client import TraceClient
from tests.faults import engine
from tests.faults.fault import Fault, Repetition
from tests.faults.killed import finish
from tests.faults.outcome import Outcome
from tests.faults.processes import Bridge, asking, running, wait_until
from tests.faults.verifier import verify

_ROWS = 1500  # 2.9 MB of record bytes
_LEAST_MIB, _MOST_MIB = 2, 3


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of so many MiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def enlarge(disk: Path) -> None:
    """Give the file system room."""
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)


@cache
def cannot_mount() -> str:
    """Say why no file system can be mounted here, empty if one can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux to mount a small file system"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder) / "disk", 1):
                return ""
        except subprocess.CalledProcessError:
            return "may not mount a file system here"


def disk_full(repetition: Repetition) -> Outcome:
    """Killed and started again on the full disk; then there is room and the engine goes on."""
    with ExitStack() as stack:
        mib = int(repetition.rng.integers(_LEAST_MIB, _MOST_MIB + 1))
        disk = stack.enter_context(small_disk(repetition.folder / "disk", mib))
        bridge = stack.enter_context(closing(Bridge(disk / "store")))
        stream = repetition.stream(bridge.endpoint, rows=_ROWS)
        process = stack.enter_context(running(engine.run, stream))
        outcome = _held_while_full(repetition, bridge, stream)
        bridge.kill()
        bridge.restart()
        outcome += _held_while_full(repetition, bridge, stream)
        enlarge(disk)
        outcome += finish(repetition, process, stream)
        with asking(bridge.endpoint, repetition.end) as client:
            return outcome + verify(client, stream) + Outcome(met=1)


def limit_reached(repetition: Repetition) -> Outcome:
    """Killed at its limit and started again with a larger one."""
    with closing(Bridge(repetition.folder / "store", disk_limit="2MiB")) as bridge:
        stream = repetition.stream(bridge.endpoint, rows=_ROWS)
        with running(engine.run, stream) as process:
            outcome = _held_while_full(repetition, bridge, stream)
            bridge.kill()
            bridge.restart(disk_limit="64MiB")
            outcome += finish(repetition, process, stream)
        with asking(bridge.endpoint, repetition.end) as client:
            return outcome + verify(client, stream) + Outcome(met=1)


def scratch_full(repetition: Repetition) -> Outcome:
    """Memory is full and so is the disk below it; then there is room and the engine goes on."""
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(repetition.folder / "disk", _LEAST_MIB))
        bridge = stack.enter_context(closing(Bridge(memory_limit="512KiB", spill=disk)))
        stream = repetition.stream(bridge.endpoint, rows=_ROWS)
        process = stack.enter_context(running(engine.run, stream))
        outcome = _held_while_full(repetition, bridge, stream)
        enlarge(disk)
        outcome += finish(repetition, process, stream)
        with asking(bridge.endpoint, repetition.end) as client:
            return outcome + verify(client, stream) + Outcome(met=1)


def _held_while_full(repetition: Repetition, bridge: Bridge, stream: engine.Stream) -> Outcome:
    """Wait for records to be refused; what was acknowledged is served all the same."""
    with asking(bridge.endpoint, repetition.end) as client:
        wait_until(lambda: _refuses(client), repetition.end, "the store is full")
        outcome = verify(client, stream)
    unfinished = stream.promises().count < 2 * stream.expected.rows
    outcome.acknowledged = 0  # counted at the end
    return outcome + Outcome(reports=[] if unfinished else ["it was never full"])


def _refuses(client: TraceClient) -> bool:
    return bool(client.stats().full)


FAULTS = (
    Fault(
        "full disk (tmpfs of 2 or 3 MiB)", "disk", disk_full, side_by_side=6, missing=cannot_mount
    ),
    Fault("--disk-limit reached", "disk", limit_reached, side_by_side=6),
    Fault(
        "full memory and full scratch disk (tmpfs)",
        "memory",
        scratch_full,
        side_by_side=6,
        missing=cannot_mount,
    ),
)
