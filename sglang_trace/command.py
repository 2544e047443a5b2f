"""The command `sglang-trace`: server, trainer, bridge and patches under one name."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from bridge.cli.app import app as bridge_app
from patches.cli import app as patches_app

PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=(
        "FP4 rollouts whose rounding the trainer follows.\n\n"
        "Examples:\n\n"
        "  sglang-trace patches apply\n\n"
        "  sglang-trace serve --trace-capture --model-path Qwen/Qwen3-30B-A3B\n\n"
        "  sglang-trace train --nproc-per-node 8 train.py\n\n"
        "  sglang-trace bridge top"
    ),
)
app.add_typer(bridge_app, name="bridge")
app.add_typer(patches_app, name="patches")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sglang-trace {version('sglang-trace')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command(context_settings=PASSED_ON)
def serve(context: typer.Context) -> None:
    """Start SGLang's server, with --trace-* options: python -m sglang_trace.launch_server."""
    from sglang_trace.launch_server import main as launch

    raise typer.Exit(launch(context.args))


@app.command(context_settings=PASSED_ON)
def train(context: typer.Context) -> None:
    """Start a training script in every rank, as torchrun does: python -m megatron_trace.launch."""
    from megatron_trace.launch import main as launch

    raise typer.Exit(launch(context.args))


def main() -> None:
    """Run the command; the entry point of the console script."""
    app(prog_name="sglang-trace")
