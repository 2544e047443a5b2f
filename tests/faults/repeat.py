"""Repeat a fault, some repetitions side by side."""

from __future__ import annotations

import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import SEEDS_OF_A_FAULT, Fault, Repetition
from tests.faults.outcome import Hang, Outcome, total

Progress = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Row:
    """All repetitions of a fault, or why there are none; ``violations`` are by seed."""

    fault: Fault
    repetitions: int
    outcome: Outcome
    violations: dict[int, Outcome]
    seconds: float
    skipped: str = ""


def repeat(
    fault: Fault,
    seeds: list[int],
    *,
    stop_s: float = 10.0,
    scratch: Path | None = None,
    progress: Progress = lambda: None,
) -> Row:
    """Run a repetition for every seed; ``scratch`` is where stores and journals are."""
    skipped = fault.missing()
    if skipped:
        return Row(fault, 0, Outcome(), {}, 0.0, skipped)
    started, outcomes = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="faults-", dir=scratch) as name:
        folder = Path(name)
        with (
            fault.setting(folder / "setting") as setting,
            ThreadPoolExecutor(fault.side_by_side) as pool,
        ):

            def one(seed: int) -> tuple[int, Outcome]:
                return seed, _once(fault, seed, folder / str(seed), setting, stop_s)

            for done in as_completed([pool.submit(one, seed) for seed in seeds]):
                seed, outcomes[seed] = done.result()
                progress()
    violations = {seed: outcome for seed, outcome in outcomes.items() if outcome.violated}
    seconds = time.monotonic() - started
    return Row(fault, len(seeds), total(outcomes.values()), violations, seconds)


def seeds_of(fault: Fault, first: int, repetitions: int) -> list[int]:
    """Return the seeds of a run, other ones for every fault."""
    base = zlib.crc32(f"{first} {fault.name} {fault.tier}".encode()) % 10**6 * SEEDS_OF_A_FAULT
    return [base + number for number in range(max(1, round(repetitions * fault.share)))]


def _once(fault: Fault, seed: int, folder: Path, setting: object, stop_s: float) -> Outcome:
    repetition = Repetition.begin(seed, folder, setting, stop_s)
    try:
        outcome: Outcome = fault.run(repetition)
    except Hang as hang:
        return Outcome(hangs=1, reports=[f"not in time: {hang}"])
    except Exception as error:
        return Outcome(reports=[f"{type(error).__name__}: {error}"])
    if not outcome.violated:
        shutil.rmtree(folder)
    return outcome
