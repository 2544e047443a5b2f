"""The commands ``apply``, ``revert``, ``status``, ``verify`` and ``export``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from patches import edit
from patches.config import Target, load_targets, select_target
from patches.errors import NotInstalledError, PatchError
from patches.export import export_series
from patches.report import Report, report
from patches.state import State

app = typer.Typer(
    help="Patch the installed SGLang and Megatron-core in place, reversibly, and check them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TARGET]...", help="Default: every target that is installed."),
]
Site = Annotated[
    Path | None,
    typer.Option(
        "--site",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Another site-packages directory than this interpreter's.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def apply(names: Names = None, site: Site = None) -> None:
    """Apply the series for the installed version; a second time changes nothing."""
    _edit_each(names, site, edit.apply, "patched", "is patched already")


@app.command()
def revert(names: Names = None, site: Site = None) -> None:
    """Restore the released files byte for byte, also after an interrupted apply."""
    _edit_each(names, site, edit.revert, "reverted", "has nothing to revert")


@app.command()
def status(names: Names = None, site: Site = None, as_json: Json = False) -> None:
    """Show what is installed, what is patched and what is in the way."""
    reports = [report(target, site) for target in _selected(names)]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in reports], indent=2))
        return
    Console().print(_table(reports))
    for each in reports:
        for path, problem in each.faults.items():
            typer.echo(f"{each.target}: {path} {problem}")
        if each.remedy:
            typer.echo(f"{each.target}: {each.remedy}")


@app.command()
def verify(names: Names = None, site: Site = None, as_json: Json = False) -> None:
    """Exit with 0 only if every target is fully patched with the current series."""
    reports = [report(target, site) for target in _selected(names)]
    if not names and any(each.state != State.NOT_INSTALLED for each in reports):
        reports = [each for each in reports if each.state != State.NOT_INSTALLED]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in reports], indent=2))
    for each in reports:
        if each.remedy:
            _errors.print(f"error: {each.remedy}")
        elif not as_json:
            typer.echo(f"{each.target} {each.installed} is patched ({each.patches} patches)")
    if any(each.remedy for each in reports):
        raise typer.Exit(1)


@app.command()
def export(
    name: Annotated[str, typer.Argument(metavar="TARGET")],
    version: Annotated[str, typer.Argument(metavar="VERSION")],
    tree: Annotated[Path, typer.Option("--tree", help="Git tree with one commit a patch.")],
    base: Annotated[str, typer.Option("--base", help="Commit with the released files.")],
) -> None:
    """Write the commits after BASE as the series of TARGET for VERSION (for maintainers)."""
    try:
        series = export_series(select_target(name), version, tree, base)
    except PatchError as error:
        _errors.print(f"error: {error}")
        raise typer.Exit(1) from None
    typer.echo(f"{name} {version}: {len(series.patches)} patches, {_lines(series.edited_lines())}")


def _selected(names: list[str] | None) -> list[Target]:
    try:
        return [select_target(name) for name in names or load_targets()]
    except PatchError as error:
        _errors.print(f"error: {error}")
        raise typer.Exit(1) from None


def _edit_each(
    names: list[str] | None, site: Path | None, change: edit.Change, done: str, idle: str
) -> None:
    """Change every target, then exit with 1 if one failed.

    A target that was not asked for by name may be absent, as long as another one is there.
    """
    targets = _selected(names)
    failures: list[PatchError] = []
    absences: list[PatchError] = []
    for target in targets:
        try:
            changed = change(target, site)
            typer.echo(f"{target.name} {done}" if changed else f"{target.name} {idle}")
        except NotInstalledError as error:
            absences.append(error)
        except PatchError as error:
            failures.append(error)
    if names or len(absences) == len(targets):
        failures += absences
    for failure in failures:
        _errors.print(f"error: {failure}")
    if failures:
        raise typer.Exit(1)


def _table(reports: list[Report]) -> Table:
    table = Table("target", "installed", "series", "state", "patches", "edited lines")
    for each in reports:
        patches = str(each.patches) if each.series else "-"
        row = (each.target, each.installed or "-", each.series or "none", each.state, patches)
        table.add_row(*row, _lines(each.edited_lines))
    return table


def _lines(edited: dict[str, int]) -> str:
    return ", ".join(f"{count} {group}" for group, count in sorted(edited.items())) or "-"
