"""`python -m scripts.house`: the layout of the packages in numbers; fails where it breaks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scripts.house.circles import circles
from scripts.house.modules import Package
from scripts.house.sizes import sizes

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bridge", "sglang_trace", "megatron_trace", "patches")
MAX_MODULES = 13


def measure(root: Path) -> dict[str, Any]:
    """Return the numbers of one package, with the lines that say what is wrong."""
    package = Package(root)
    folders = package.modules_by_folder()
    fullest = max(folders, key=lambda folder: folders[folder])
    imports = list(package.imports())
    return {
        "package": package.name,
        "fullest_folder": str(Path(fullest).relative_to(root.parent)),
        "modules": folders[fullest],
        "upward": sorted({f"{i.source} imports {i.target}" for i in imports if i.is_upward}),
        "circles": circles(imports),
        **asdict(sizes(package)),
    }


def broken(measured: dict[str, Any]) -> list[str]:
    """Return why a package's layout is refused."""
    found = [f"upward import: {line}" for line in measured["upward"]]
    found += [f"circle: {line}" for line in measured["circles"]]
    if measured["modules"] > MAX_MODULES:
        found.append(
            f"{measured['fullest_folder']} has {measured['modules']} modules; give some of them a "
            f"folder that answers one question, so that at most {MAX_MODULES} are left"
        )
    return found


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="layout of the packages (lines of code with comments)")
    for title in ("package", "modules in the fullest folder", "upward", "circles"):
        table.add_column(title)
    for title in (
        "file: median",
        "largest",
        "function: median",
        "largest",
        "no docstring",
        "lines",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        cells: list[Any] = [row["package"], f"{row['modules']} ({row['fullest_folder']})"]
        cells += [len(row["upward"]), len(row["circles"]), row["median_file"], row["largest_file"]]
        cells += [row["median_function"], row["largest_function"], len(row["undocumented"])]
        table.add_row(*map(str, cells), f"{row['lines']:,}")
    return table


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the layout of the packages; exit with 1 if a folder is too full or imports run back."""
    rows = [measure(ROOT / name) for name in PACKAGES]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(_table(rows))
    found = [line for row in rows for line in broken(row)]
    for line in found:
        Console(stderr=True).print(f"error: {line}", soft_wrap=True)
    if found:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
