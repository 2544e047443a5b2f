"""The fault table of the bridge: every fault many times, real processes, every byte compared.

    python -m tests.faults.table                                  # every fault 100 times
    python -m tests.faults.table --only "kill -9" --repetitions 5
    python -m tests.faults.table --only "full disk" --seed 7000   # one repetition again

The exit status is 1 if an acknowledged row was lost, a wrong one served, a step hung, a process
took more memory than its limit or anything else went otherwise than stated. A seed repeats the
choices of a repetition, not the kernel's timing.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.command_line import command_line
from tests.faults import clock, full, killed, memory, persistence, schema, stopped, tampered
from tests.faults.fault import Fault
from tests.faults.repeat import Row, repeat, seeds_of

FAULTS: tuple[Fault, ...] = (
    *killed.FAULTS,
    *stopped.FAULTS,
    *tampered.FAULTS,
    *full.FAULTS,
    *persistence.FAULTS,
    *clock.FAULTS,
    *schema.FAULTS,
    *memory.FAULTS,
)
_MOST_TOLD = 5  # violations of a fault that are printed


def main(
    repetitions: Annotated[int, typer.Option(min=1, help="Of every fault.")] = 100,
    only: Annotated[str, typer.Option(help="Faults whose name has this text.")] = "",
    tier: Annotated[str, typer.Option(help="memory or disk; default: both.")] = "",
    stop: Annotated[float, typer.Option(help="Seconds for which a peer is stopped.")] = 10.0,
    seed: Annotated[
        int | None, typer.Option(help="Only this repetition, as the table names it.")
    ] = None,
    first: Annotated[int, typer.Option(help="Another number makes other choices.")] = 0,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder of stores; default: that of temporary files.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--json", help="Where to write JSON; rows of other faults in it stay."),
    ] = None,
    log: Annotated[Path, typer.Option(help="Where the processes' own words go.")] = Path(
        "out/faults.log"
    ),
) -> None:
    """Runs the fault table of the bridge and prints it."""
    console = Console()
    chosen = [fault for fault in FAULTS if only in fault.name and tier in fault.tier]
    if not chosen:
        sys.exit(f"error: no fault has {only!r} in its name and {tier!r} as its tier")
    # So that what is under way is ended and no process is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = []
    with _stderr_to(log), _progress(console) as progress:
        for fault in chosen:
            seeds = seeds_of(fault, first, repetitions) if seed is None else [seed]
            task = progress.add_task(f"{fault.name} ({fault.tier})", total=len(seeds))
            row = repeat(
                fault,
                seeds,
                stop_s=stop,
                scratch=scratch,
                progress=lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
            rows.append(row)
            _tell(progress.console, row)
            if out is not None:
                _write(out, _document(stop), [_row(row, first) for row in rows])
    console.print(_table(rows))
    if any(row.violations for row in rows):
        sys.exit(1)


@contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    """Let daemons and engines, which inherit it, write to a file meanwhile."""
    log.parent.mkdir(parents=True, exist_ok=True)
    before = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _tell(console: Console, row: Row) -> None:
    """Print why a fault did not run and the seeds of what went wrong."""
    if row.skipped:
        console.print(f"[yellow]{row.fault.name} ({row.fault.tier}): {row.skipped}")
    for seed, outcome in list(row.violations.items())[:_MOST_TOLD]:
        console.print(
            f"[red]{row.fault.name} ({row.fault.tier}), --seed {seed}: {outcome}", highlight=False
        )


def _table(rows: list[Row]) -> Table:
    table = Table(
        title="rows lost or wrong, stores refused, hangs, all else: must be 0",
        caption="met: work was under way; memory: the fullest process over its limit",
        box=box.SIMPLE,
        padding=0,
    )
    table.add_column("fault", min_width=30)
    for name in (
        "times",
        "met",
        "acked",
        "lost",
        "wrong",
        "refused",
        "hangs",
        "else",
        "memory",
        "s",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        result = row.outcome
        counts = (result.acknowledged, result.lost, result.wrong, result.refused, result.hangs)
        table.add_row(
            f"{row.fault.name} ({row.fault.tier})",
            *(f"{value:,}" for value in (row.repetitions, result.met, *counts)),
            str(len(result.reports)),
            f"{result.memory.ratio:.2f}" if result.memory else "",
            "skipped" if row.skipped else f"{row.seconds:.0f}",
            style="red" if row.violations else "",
        )
    return table


def _write(out: Path, document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write what there is, after every fault: the whole table takes half an hour."""
    out.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(out.read_text()) if out.exists() else {"rows": []}
    known = {}
    for told, its_rows in ((before, before["rows"]), (document, rows)):
        for row in its_rows:
            run = row.get("run") or {name: told[name] for name in ("date", "commit", "command")}
            known[row["fault"], row["tier"]] = {**row, "run": run}
    order = [known[key] for fault in FAULTS if (key := (fault.name, fault.tier)) in known]
    whole = {**document, "totals": _totals(order), "rows": order}
    out.write_text(json.dumps(whole, indent=1) + "\n")


def _totals(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Add up what all faults came to."""
    counts = ("lost", "wrong", "refused", "hangs")
    return {
        "faults": sum(row["repetitions"] for row in rows),
        **{name: sum(row.get(name, 0) for row in rows) for name in counts},
    }


def _document(stop_s: float) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = ("lmdb", "msgpack", "numpy", "pyzmq", "xxhash")
    return {
        "name": "faults",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command_line("tests.faults.table"),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            **{package: version(package) for package in packages},
        },
        "stop_s": stop_s,
    }


def _row(row: Row, first: int) -> dict[str, Any]:
    return {
        "fault": row.fault.name,
        "tier": row.fault.tier,
        "repetitions": row.repetitions,
        "first": first,
        "skipped": row.skipped,
        "promise": row.fault.promise,
        **asdict(row.outcome),
        "seconds": round(row.seconds, 1),
        "violations": {str(seed): asdict(item) for seed, item in row.violations.items()},
    }


if __name__ == "__main__":
    typer.run(main)
