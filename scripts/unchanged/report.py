"""The comparison as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.unchanged.measured import Comparison, Measured

SHOWN_DIFFERENCES = 10


def print_tables(comparisons: Sequence[Comparison], notes: Sequence[str]) -> None:
    """Print both results side by side, then the differences (the first ten of a row)."""
    console = Console()
    for part in dict.fromkeys(each.part for each in comparisons):
        console.print(_table(part, [each for each in comparisons if each.part == part]))
    for each in comparisons:
        for name, (old, new) in list(each.differences.items())[:SHOWN_DIFFERENCES]:
            line = f"{each.part}, {each.released.name}, {name}: {old} -> {new}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _table(part: str, comparisons: Sequence[Comparison]) -> Table:
    table = Table("what", "released", "patched", title=part, title_justify="left")
    table.add_column("values", justify="right")
    table.add_column("different", justify="right")
    for each in comparisons:
        table.add_row(
            each.released.name,
            _cell(each.released),
            _cell(each.patched),
            f"{len(each.released.values):,}",
            f"[bold red]{len(each.differences)}" if each.differences else "0",
        )
    return table


def _cell(measured: Measured) -> str:
    return f"{measured.shown}\n{measured.digest()}"


def write_json(
    file: Path, versions: dict[str, str], comparisons: Sequence[Comparison], notes: Sequence[str]
) -> None:
    """Write everything that the table shows, all differences and all test outcomes."""
    rows: list[dict[str, Any]] = [
        {
            "part": each.part,
            "what": each.released.name,
            "released": {"shown": each.released.shown, "digest": each.released.digest()},
            "patched": {"shown": each.patched.shown, "digest": each.patched.digest()},
            "values": len(each.released.values),
            "differences": each.differences,
            "same": each.same,
        }
        for each in comparisons
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"versions": versions, "rows": rows, "notes": list(notes)}
    file.write_text(json.dumps(content, indent=2) + "\n")
