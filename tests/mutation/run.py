"""The mutation run: every mutation of the listed modules, and whether a test notices it.

    python -m tests.mutation.run                              # all modules, two processes
    python -m tests.mutation.run --only bridge/client/merge.py     # one, the others' results kept

The exit status is 1 if less than 95 % are noticed, or a module's tests fail without a mutation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.result import LEAST_SCORE, merged, read, show, write
from tests.mutation.targets import TARGETS, Target
from tests.mutation.trial import Verdict, prepare, start, verdict


class Broken(Exception):
    """A module's tests fail without a mutation."""


@dataclass
class Outcome:
    """What became of a module's mutants."""

    target: Target
    killed: list[Mutant] = field(default_factory=list)
    survived: list[Mutant] = field(default_factory=list)
    minutes: float = 0.0

    def add(self, mutant: Mutant, found: Verdict) -> None:
        (self.killed if found is Verdict.KILLED else self.survived).append(mutant)


def main(
    only: Annotated[str, typer.Option(help="Modules whose path has this text.")] = "",
    processes: Annotated[int, typer.Option(min=1, help="At a time.")] = 2,
    to: Annotated[
        Path, typer.Option("--json", help="Where results are kept, module by module.")
    ] = Path("out/mutation.json"),
) -> None:
    """Try every mutation of the listed modules."""
    prepare()
    console = Console()
    for target in TARGETS:
        if only in target.path:
            console.print(f"{target.path} …")
            outcome = tried(target, processes)
            write(to, merged(read(to), outcome))
    result = read(to)
    show(result, console)
    raise SystemExit(result["score"] < LEAST_SCORE)


def tried(target: Target, processes: int) -> Outcome:
    """Return what became of every mutation of one module."""
    began, outcome = time.monotonic(), Outcome(target)
    cpu_s = int(10 + 5 * _unchanged(target))
    waiting: Iterator[Mutant] = mutants_of(target.source())
    running: dict[int, Mutant] = {}
    while True:
        while len(running) < processes and (mutant := next(waiting, None)):
            running[start(target, mutant.source, cpu_s)] = mutant
        if not running:
            break
        pid, status = os.wait()
        outcome.add(running.pop(pid), verdict(status))
    outcome.minutes = (time.monotonic() - began) / 60
    return outcome


def _unchanged(target: Target) -> float:
    """Return the CPU seconds that the target's tests take when nothing is changed."""
    pid = start(target, target.source(), cpu_s=600)
    _, status, used = os.wait4(pid, 0)
    if verdict(status) is not Verdict.SURVIVED:
        raise Broken(f"The tests of {target.path} fail without a mutation; mend them first.")
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    typer.run(main)
