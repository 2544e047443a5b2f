"""Command line of the bridge: serve it, inspect it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from bridge.errors import TraceError
from bridge.inspection import inspect_directory, inspect_endpoint, render, to_json
from bridge.serving import LogLevel, serve_until_stopped

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Carry records of FP4 rollouts from inference engines to trainers.",
)

DirOption = Annotated[
    Path | None,
    typer.Option("--dir", help="Keep records here (LMDB), safe against crashes.", metavar="DIR"),
]


@app.command()
def serve(
    endpoint: Annotated[
        str, typer.Option(help="Where to listen: a loopback address; port 0 takes a free port.")
    ] = "tcp://127.0.0.1:5601",
    directory: DirOption = None,
    disk_limit: Annotated[
        str, typer.Option(help="Most that the files under --dir may take.", metavar="SIZE")
    ] = "64GiB",
    memory_limit: Annotated[
        str, typer.Option(help="Most to hold in memory when there is no --dir.", metavar="SIZE")
    ] = "8GiB",
    log_level: Annotated[LogLevel, typer.Option(help="What to log to stderr.")] = LogLevel.WARNING,
    parent: Annotated[
        int | None, typer.Option(help="Stop when this parent process ends.", metavar="PID")
    ] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; prints `bridge ready ENDPOINT` when it listens.

    With --dir an acknowledged record survives a crash; without, records live in memory only.
    """
    with _one_sentence_errors():
        serve_until_stopped(endpoint, directory, disk_limit, memory_limit, log_level, parent)


@app.command()
def inspect(
    trajectory: Annotated[
        str, typer.Argument(help="Only trajectories whose name begins so.", metavar="[TRAJECTORY]")
    ] = "",
    endpoint: Annotated[str, typer.Option(help="The bridge to ask.")] = "tcp://127.0.0.1:5601",
    directory: DirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """List trajectories, rows and bytes of a running bridge, or of a --dir without one."""
    with _one_sentence_errors():
        if directory is None:
            inspection = inspect_endpoint(endpoint, trajectory)
        else:
            inspection = inspect_directory(directory, trajectory)
        print(to_json(inspection)) if as_json else render(inspection)


@contextmanager
def _one_sentence_errors() -> Iterator[None]:
    try:
        yield
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
