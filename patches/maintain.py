"""The commands for those who make the series: ``export`` and ``rebase``."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from patches.config import Target, select_target, version_key
from patches.errors import PatchError, file_errors_explained
from patches.export import export_series
from patches.progress import Outcome
from patches.rebase import Rebase, Stopped, nearest_version
from patches.release import published_versions
from patches.report import count_lines
from patches.series import Series

_errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

Name = Annotated[str, typer.Argument(metavar="TARGET")]


def export(
    name: Name,
    version: Annotated[str, typer.Argument(metavar="VERSION")],
    tree: Annotated[Path, typer.Option("--tree", help="Git tree with one commit a patch.")],
    base: Annotated[str, typer.Option("--base", help="Commit with the released files.")],
) -> None:
    """Write the commits after BASE as the series of TARGET for VERSION (for maintainers)."""
    with _errors_reported():
        series = export_series(select_target(name), version, tree, base)
        _say_done(name, series)


def rebase(
    name: Name,
    to: Annotated[str | None, typer.Option("--to", metavar="VERSION")] = None,
    all_newer: Annotated[
        bool, typer.Option("--all-newer", help="One release after the other, up to the newest.")
    ] = False,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Take what you made of the conflict and go on.")
    ] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Drop a rebase under way.")] = False,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="VERSION", help="Start from this series, not the nearest."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would happen to every patch; write nothing.")
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option("--work", metavar="DIR", help="Default: out/rebase/TARGET.", file_okay=False),
    ] = None,
) -> None:
    """Move the nearest series to another release of TARGET (for maintainers)."""
    with _errors_reported():
        if [to is not None, all_newer, go_on, abort].count(True) != 1:
            raise PatchError("give one of --to VERSION, --all-newer, --continue and --abort.")
        if shutil.which("git") is None:
            raise PatchError("rebase needs git: install it.")
        target = select_target(name)
        place = (work or Path("out") / "rebase" / name).resolve()
        if abort:
            shutil.rmtree(Rebase.resume(target, place).work)
        elif go_on:
            _run(Rebase.resume(target, place))
        elif dry_run:
            with tempfile.TemporaryDirectory() as copy:
                trial = _copy(target, Path(copy))
                for version in [to] if to else _newer(trial):
                    _try(trial, source, version, Path(copy) / "work")
        else:
            for version in [to] if to else _newer(target):
                _run(Rebase.start(target, _source(target, source, version), version, place))


def _newer(target: Target) -> list[str]:
    newest = version_key(target.versions()[-1])
    newer = [each for each in published_versions(target) if version_key(each) > newest]
    if not newer:
        raise PatchError(f"{target.name} has a series for its newest release.")
    return newer


def _source(target: Target, source: str | None, version: str) -> str:
    return nearest_version(target, version) if source is None else source


def _run(rebase: Rebase) -> None:
    """Pick what is left, then write the series; PatchError at a conflict."""
    stopped = rebase.carry_on()
    if stopped is not None:
        _print_table(rebase, stopped)
        raise PatchError(
            f"{stopped.patch.name} does not merge with {rebase.progress.version}: read "
            f"{stopped.report}, solve it in {rebase.tree}, then run "
            f"`python -m patches rebase {rebase.target.name} --continue --work {rebase.work}`."
        )
    series = rebase.finish()
    _print_table(rebase, None)
    _say_done(rebase.target.name, series)
    for hook in rebase.lost_hooks(series):
        _errors.print(f"warning: {rebase.progress.version} no longer calls {hook}.")


def _try(trial: Target, source: str | None, version: str, work: Path) -> None:
    """Show what becomes of every patch; PatchError where one conflicts."""
    rebase = Rebase.start(trial, _source(trial, source, version), version, work)
    while (stopped := rebase.carry_on()) is not None:
        typer.echo(stopped.report.read_text("utf-8"))
        rebase.skip(stopped)
    conflicts = list(rebase.progress.outcomes.values()).count(Outcome.CONFLICT)
    if not conflicts:
        rebase.finish()
    _print_table(rebase, None)
    if conflicts:
        raise PatchError(
            f"{conflicts} patches do not merge with {trial.name} {version}: run rebase without "
            "--dry-run to solve them."
        )


def _copy(target: Target, root: Path) -> Target:
    """A copy of the target's series to try things on."""
    shutil.copytree(target.series_dir, root / target.name)
    shutil.copy(target.series_dir.parent / "config.json", root)
    return replace(target, series_dir=root / target.name)


def _print_table(rebase: Rebase, stopped: Stopped | None) -> None:
    progress = rebase.progress
    outcomes = dict(progress.outcomes)
    if stopped is not None:
        outcomes[stopped.patch.name] = Outcome.CONFLICT
    table = Table("patch", f"from {progress.source} to {progress.version}")
    for name, outcome in outcomes.items():
        table.add_row(name, outcome)
    Console().print(table)


def _say_done(name: str, series: Series) -> None:
    lines = count_lines(series.edited_lines())
    typer.echo(f"{name} {series.version}: {len(series.patches)} patches, {lines}")


@contextmanager
def _errors_reported() -> Iterator[None]:
    try:
        with file_errors_explained():
            yield
    except PatchError as error:
        _errors.print(f"error: {error}")
        raise typer.Exit(1) from None
