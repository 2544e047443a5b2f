"""The command line: the user's commands here, the maintainer's in ``patches/maintain``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from patches.apply import edit
from patches.apply.report import Report, count_lines, report
from patches.apply.state import State, Where, require_upstream
from patches.apply.tree import Checkout
from patches.check.doctor import diagnose, in_words
from patches.config import Target, load_targets, select_target
from patches.errors import NotInstalledError, PatchError
from patches.maintain import commands

HELP = (
    "Patch SGLang and Megatron-core in place, reversibly, and check them.\n\n"
    "`apply`, then `doctor`, then start your job through our launchers; `status` says what is "
    "there and which command fixes it. TARGET is one of the names that `status` shows; without "
    "one a command works on every target that is there. Without --site and --tree that is the "
    "copy that Python would import."
)
app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TARGET]...", help="Default: every target that is there."),
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
Tree = Annotated[
    Path | None,
    typer.Option(
        "--tree",
        metavar="DIR",
        exists=True,
        file_okay=False,
        resolve_path=True,
        help="A git checkout or unpacked sources instead of an installed package.",
    ),
]
Version = Annotated[
    str | None,
    typer.Option(
        "--version",
        metavar="X",
        help="With --tree: the release to take it for, where its files say none or another one.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def apply(
    names: Names = None, site: Site = None, tree: Tree = None, version: Version = None
) -> None:
    """Apply the series for the version that is there; a second time changes nothing."""
    _edit_each(names, _where(site, tree, version), edit.apply, "patched", "is patched already")


@app.command()
def revert(
    names: Names = None, site: Site = None, tree: Tree = None, version: Version = None
) -> None:
    """Restore the released files byte for byte, also after an interrupted apply."""
    _edit_each(names, _where(site, tree, version), edit.revert, "reverted", "has nothing to revert")


@app.command()
def status(
    names: Names = None,
    site: Site = None,
    tree: Tree = None,
    version: Version = None,
    as_json: Json = False,
) -> None:
    """Show what is installed, what is patched and what is in the way."""
    where = _where(site, tree, version)
    reports = [report(target, where) for target in _selected(names)]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in reports], indent=2))
        return
    Console().print(_table(reports))
    for each in reports:
        if each.site:
            typer.echo(f"{each.target}: in {each.site}")
        for path, problem in each.faults.items():
            typer.echo(f"{each.target}: {path} {problem}")
        if each.remedy:
            typer.echo(f"{each.target}: {each.remedy}")


@app.command()
def verify(
    names: Names = None,
    site: Site = None,
    tree: Tree = None,
    version: Version = None,
    as_json: Json = False,
) -> None:
    """Exit with 0 only if every target is fully patched with the current series."""
    where = _where(site, tree, version)
    reports = [report(target, where) for target in _present(names, where)]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in reports], indent=2))
    for each in reports:
        if each.remedy:
            _errors.print(f"error: {each.remedy}")
        elif not as_json:
            patched = f"{each.target} {each.installed} is patched ({each.patches} patches)"
            typer.echo(f"{patched} in {each.site}")
    if any(each.remedy for each in reports):
        raise typer.Exit(1)


@app.command()
def doctor(
    names: Names = None,
    site: Site = None,
    tree: Tree = None,
    version: Version = None,
    as_json: Json = False,
) -> None:
    """Import what is patched and check every hook; exit with 0 only if all of them are live."""
    where = _where(site, tree, version)
    found = [diagnose(target, where) for target in _present(names, where)]
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in found], indent=2))
    else:
        for each in found:
            typer.echo("\n".join(in_words(each)))
    if not all(each.healthy for each in found):
        raise typer.Exit(1)


# After the users' commands, because the help lists them in this order.
app.command(rich_help_panel="For maintainers of the series")(commands.export)
app.command(rich_help_panel="For maintainers of the series")(commands.rebase)


def _selected(names: list[str] | None) -> list[Target]:
    try:
        return [select_target(name) for name in names or load_targets()]
    except PatchError as error:
        _errors.print(f"error: {error}")
        raise typer.Exit(1) from None


def _present(names: list[str] | None, where: Where) -> list[Target]:
    """The targets that were named; without a name those that are there, or all if none is."""
    targets = _selected(names)
    there = [each for each in targets if report(each, where).state != State.NOT_INSTALLED]
    return targets if names else there or targets


def _where(site: Path | None, tree: Path | None, version: str | None) -> Where:
    if tree is None and version is None:
        return site
    if tree is None or site is not None:
        _errors.print("error: give --site, or --tree with or without --version.")
        raise typer.Exit(1)
    return Checkout(tree, version)


def _edit_each(
    names: list[str] | None, where: Where, change: edit.Change, done: str, idle: str
) -> None:
    """Change every target, then exit with 1 if one failed.

    A target that was not asked for by name may be absent, as long as another one is there.
    """
    targets = _selected(names)
    failures: list[PatchError] = []
    absences: list[PatchError] = []
    for target in targets:
        try:
            verdict = done if change(target, where) else idle
            typer.echo(f"{target.name} {verdict} in {require_upstream(target, where).site}")
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
        table.add_row(*row, count_lines(each.edited_lines))
    return table
