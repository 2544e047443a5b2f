"""The command `sglang-trace`: server, trainer, bridge and patches under one name."""

from __future__ import annotations

import typer

from bridge.cli.app import app as bridge_app
from bridge.cli.help_text import VersionOption, examples
from patches.cli import app as patches_app

PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="FP4 rollouts whose rounding the trainer follows.",
    epilog=examples(
        "sglang-trace patches apply",
        "sglang-trace serve --trace-capture --model-path Qwen/Qwen3-30B-A3B",
        "sglang-trace train --nproc-per-node 8 train.py",
        "sglang-trace bridge top",
        "sglang-trace --install-completion",
    ),
)
app.add_typer(bridge_app, name="bridge")
app.add_typer(patches_app, name="patches")


@app.callback()
def options(_version: VersionOption = False) -> None:
    """Take the options that stand before a command's name."""


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
