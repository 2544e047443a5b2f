"""The main job on the real upstreams: FP4 rollout with capture, guided GRPO step, weights back.

Run it with `make demo`, or `python -m examples.demo --help`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.demo import pipeline, report
from examples.demo.requirements import unmet
from examples.demo.server import ServerFailed
from examples.demo.stages import StageFailed, Stages

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for logs, checkpoints and results.")] = Path(
        "out/demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and sampling.")] = 0,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, i.e. GRPO groups.")] = 16,
    samples: Annotated[int, typer.Option(min=2, help="Samples a prompt.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens sampled a trajectory.")] = 64,
) -> None:
    """Runs patched SGLang and patched Megatron-core end to end on this machine.

    One FP4 rollout with the default capture feeds a guided GRPO step, whose weights go back to the
    running server. A second one with full capture, and one in BF16, give the comparison table.
    Writes report.json and report.png into the --out folder. Exits with 1 if the report does not
    show what it must.
    """
    console = Console()
    job = pipeline.Job(out.resolve(), seed, prompts, samples, new_tokens)
    try:
        with Stages(console) as stages:
            result = pipeline.run(job, stages)
    except (ServerFailed, StageFailed) as failure:
        Console(stderr=True).print(f"error: {failure}", style="red", markup=False)
        sys.exit(1)
    report.write(result, job.out)
    report.show(result, console)
    console.print(f"\n[bold]{job.out}[/]: report.json, report.png, the servers' and trainer's logs")
    if failures := list(unmet(result)):
        Console(stderr=True).print("error: " + "\n".join(failures), style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    app()
