"""What every command of this project prints about itself: its version and examples."""

from __future__ import annotations

from typing import Annotated

import typer


def examples(*lines: str) -> str:
    """Return the epilog of a command's --help: one example per line, each under 76 columns."""
    return "\n\n".join(("Examples:" if len(lines) > 1 else "Example:", *lines))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"sglang-trace {version('sglang-trace')}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
]
