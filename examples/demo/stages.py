"""Progress on the terminal: one line a stage, with a bar where the end is known."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PROGRESS_MARK = "@progress "


class StageFailed(Exception):
    """A stage's process ended with an error; the message ends with its log."""


class Stages:
    """Shows the stages of a job as they run; `seconds` holds how long each one took."""

    def __init__(self, console: Console) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """One stage; call the yielded function with (done, total) to move its bar."""
        task = self._progress.add_task(name, total=None)
        started = time.monotonic()
        yield lambda done, total: self._progress.update(task, completed=done, total=total)
        self.seconds[name] = round(time.monotonic() - started, 1)
        self._progress.update(task, completed=1, total=1)

    def process(
        self, name: str, command: list[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Runs `command` as a stage; its lines `@progress [done, total]` move the bar.

        `environment` is added to this process's own.

        Raises:
            StageFailed: it ended with another exit code than 0.
        """
        with self.stage(name) as move, log.open("w") as out:
            child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **(environment or {})},
            )
            assert child.stdout is not None
            for line in child.stdout:
                out.write(line)
                if line.startswith(PROGRESS_MARK):
                    move(*json.loads(line.removeprefix(PROGRESS_MARK)))
            if child.wait() != 0:
                out.flush()
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
                raise StageFailed(f"{name}: exit code {child.returncode}\n{tail}")


def report_progress(done: int, total: int) -> None:
    """Called by a stage's process: moves the bar of the stage that runs it."""
    print(PROGRESS_MARK + json.dumps([done, total]), flush=True)


def read_json(path: Path) -> Any:
    """The JSON a stage's process wrote."""
    return json.loads(path.read_text())
