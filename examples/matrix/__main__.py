"""The demo on every pair of upstream releases that has patches and runs on a CPU.

Run it with `make matrix`, or `python -m examples.matrix --help`.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.demo.stages import Stages
from examples.matrix.combination import Combination, Outcome, run, select
from examples.matrix.overlay import Prepared, prepare
from examples.matrix.rollouts import compare
from examples.matrix.table import as_json, comparison_table, outcome_table
from patches.config import load_targets

SIZE = ("--prompts", "8", "--samples", "4", "--new-tokens", "48")
SHORT_SIZE = ("--prompts", "4", "--samples", "4", "--new-tokens", "24")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the runs and results.")] = Path("out/matrix"),
    sites: Annotated[Path, typer.Option(help="Folder that keeps the other releases.")] = Path(
        "out/matrix/sites"
    ),
    only: Annotated[str, typer.Option(help="These versions alone, as in 0.5.21,0.16.1.")] = "",
    short: Annotated[bool, typer.Option("--short", help="As few tokens as will do.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = os.cpu_count() or 1,
) -> None:
    """Runs the demo on every pair of releases, each of them patched, and checks every report.

    Releases that the environment does not have are downloaded with pip and put first on the path.
    Writes matrix.json and every run's files into the --out folder. A run that fails does not keep
    the others from being made; the exit code is 1 then.
    """
    errors = Console(stderr=True, style="red", markup=False, highlight=False, soft_wrap=True)
    try:
        combinations = select(only)
    except ValueError as error:
        errors.print(f"error: {error}")
        sys.exit(1)
    console, size = Console(), SHORT_SIZE if short else SIZE
    with Stages(console) as stages, ThreadPoolExecutor(jobs) as pool:
        outcomes = run_all(combinations, out.resolve(), sites.resolve(), size, stages, pool)
    comparisons = list(compare(outcomes))
    out.mkdir(parents=True, exist_ok=True)
    result = as_json(outcomes, comparisons)
    (out / "matrix.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(outcome_table(outcomes))
    if comparisons:
        console.print(comparison_table(comparisons))
    for outcome in outcomes:
        for failure in outcome.failures:
            errors.print(f"error: {outcome.combination.name}: {failure}")
    if any(o.failures for o in outcomes) or not all(each.passed for each in comparisons):
        sys.exit(1)


def run_all(
    combinations: list[Combination],
    out: Path,
    sites: Path,
    size: tuple[str, ...],
    stages: Stages,
    pool: ThreadPoolExecutor,
) -> list[Outcome]:
    """Prepares every release once, then makes every run."""
    targets = load_targets()

    def prepared(upstream: tuple[str, str]) -> Prepared:
        name, version = upstream
        with stages.stage(f"{name} {version}: patched, every hook live"):
            return prepare(targets[name], version, sites)

    def outcome(combination: Combination) -> Outcome:
        needed = [ready[each] for each in combination.versions.items()]
        place = out / combination.name
        if failures := tuple(each.failure for each in needed if each.failure):
            return Outcome(combination, place, None, failures, 0.0)
        overlays = [each.place for each in needed if each.place]
        return run(combination, overlays, place, size, stages)

    upstreams = sorted({each for c in combinations for each in c.versions.items()})
    ready = dict(zip(upstreams, pool.map(prepared, upstreams), strict=True))
    return list(pool.map(outcome, combinations))


if __name__ == "__main__":
    app()
