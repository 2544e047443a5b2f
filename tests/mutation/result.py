"""The mutation run's JSON, kept module by module, and the table for people."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.mutation.equivalent import reason
from tests.mutation.targets import TARGETS

if TYPE_CHECKING:
    from tests.mutation.run import Outcome

LEAST_SCORE = 0.95
_COMMAND = "python -m tests.mutation.run"

Result = dict[str, Any]


def read(path: Path) -> Result:
    """Return what is kept, nothing if there is no file."""
    result: Result = json.loads(path.read_text()) if path.exists() else {"modules": {}}
    return result


def write(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def merged(kept: Result, outcome: Outcome) -> Result:
    """Return the results with those of one module replaced; modules that left the list go."""
    modules = kept["modules"] | {outcome.target.path: _module(outcome)}
    modules = {target.path: modules[target.path] for target in TARGETS if target.path in modules}
    killed, survived = (
        sum(module[name] for module in modules.values()) for name in ("killed", "survived")
    )
    return {
        "killed": killed,
        "survived": survived,
        "score": round(killed / (killed + survived), 4),
        "modules": modules,
        "not_tried": [target.path for target in TARGETS if target.path not in modules],
        "produced_by": {
            "command": _COMMAND,
            "python": platform.python_version(),
            **{name: version(name) for name in ("mutmut", "libcst", "hypothesis", "torch")},
        },
    }


def show(result: Result, console: Console) -> None:
    """Print a row a module, every survivor and the score."""
    table = Table("module", "killed", "survived", "score")
    for path, module in result["modules"].items():
        killed, survived = module["killed"], module["survived"]
        table.add_row(path, str(killed), str(survived), f"{killed / (killed + survived):.1%}")
    console.print(table)
    for path, module in result["modules"].items():
        for survivor in module["survivors"]:
            change = f"{survivor['before']}  ->  {survivor['after']}"
            why = survivor["reason"] or "NOT EXPLAINED"
            text = f"{path}:{survivor['line']}  {change}  ({why})"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    total = result["killed"] + result["survived"]
    console.print(f"{result['score']:.2%} of {total} mutations were noticed")
    if result["not_tried"]:
        console.print(f"Not tried yet: {', '.join(result['not_tried'])}.")


def _module(outcome: Outcome) -> Result:
    path = outcome.target.path
    return {
        "killed": len(outcome.killed),
        "survived": len(outcome.survived),
        "tests": list(outcome.target.tests),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": round(outcome.minutes, 1),
        "survivors": [
            {
                "line": mutant.line,
                "before": mutant.before,
                "after": mutant.after,
                "reason": reason(path, mutant),
            }
            for mutant in sorted(outcome.survived, key=lambda mutant: mutant.line)
        ],
    }
