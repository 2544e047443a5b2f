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

from patches.apply.report import count_lines
from patches.apply.tree import Checkout, site_of
from patches.config import Target, select_target, version_key
from patches.errors import PatchError, file_errors_explained
from patches.format.series import Series
from patches.maintain.export import export_series
from patches.maintain.progress import Outcome
from patches.maintain.rebase import Rebase, Stopped, nearest_version
from patches.maintain.release import published_versions

_errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

Name = Annotated[str, typer.Argument(metavar="TARGET")]


def export(
    name: Name,
    version: Annotated[str, typer.Argument(metavar="VERSION")],
    tree: Annotated[
        Path,
        typer.Option("--tree", metavar="DIR", help="Clone or scratch tree, one commit a patch."),
    ],
    base: Annotated[
        str, typer.Option("--base", metavar="COMMIT", help="Commit with the released files.")
    ],
) -> None:
    """Write the commits after BASE in a git tree as the series of TARGET for VERSION."""
    with _errors_reported():
        target = select_target(name)
        series = export_series(target, version, site_of(target, Checkout(tree)), base)
        _say_done(name, series)


def rebase(
    name: Name,
    to: Annotated[
        str | None, typer.Option("--to", metavar="VERSION", help="The release to move to.")
    ] = None,
    all_newer: Annotated[
        bool,
        typer.Option("--all-newer", help="Every release after the newest (or --from) series."),
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
    """Move the nearest series of TARGET to another release, or stop at a conflict."""
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
                for start, version in _moves(trial, to, source):
                    _try(Rebase.start(trial, start, version, Path(copy) / "work"))
        else:
            for start, version in _moves(target, to, source):
                _run(Rebase.start(target, start, version, place))


def _moves(target: Target, to: str | None, source: str | None) -> Iterator[tuple[str, str]]:
    """The series to start from and the release to reach, one move after the other."""
    if to is not None:
        yield source or nearest_version(target, to), to
        return
    for version in _newer(target, source):
        yield nearest_version(target, version), version


def _newer(target: Target, source: str | None) -> list[str]:
    """The published releases after ``source``, or after the newest series, that have no series."""
    known = target.versions()
    start = version_key(source or known[-1])
    published = published_versions(target)
    newer = [each for each in published if version_key(each) > start and each not in known]
    if not newer:
        raise PatchError(f"{target.name} has a series for every release after that one.")
    return newer


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


def _try(rebase: Rebase) -> None:
    """Show what becomes of every patch; PatchError where one conflicts."""
    while (stopped := rebase.carry_on()) is not None:
        typer.echo(stopped.report.read_text("utf-8"))
        rebase.skip(stopped)
    conflicts = list(rebase.progress.outcomes.values()).count(Outcome.CONFLICT)
    if not conflicts:
        rebase.finish()
    _print_table(rebase, None)
    if conflicts:
        raise PatchError(
            f"{conflicts} of {len(rebase.progress.outcomes)} patches do not merge with "
            f"{rebase.target.name} {rebase.progress.version}: run rebase without --dry-run to "
            "solve them."
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
