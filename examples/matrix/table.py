"""The matrix's results: tables for people, JSON for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from examples.matrix.combination import Outcome
from examples.matrix.rollouts import Comparison


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """A line a combination. Guided is 1 bit in all layers; gaps are means in nats a token."""
    torch = {o.report["versions"]["torch"] for o in outcomes if o.report is not None}
    title = f"The demo on every pair of releases, torch {', '.join(sorted(torch)) or 'unknown'}"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("sglang", "megatron", "records\nmissing", "codes\nguided", "codes\nRTN"):
        table.add_column(column, justify="right")
    for column in ("gap\nguided", "gap\nRTN", "s", ""):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        asked = outcome.combination.versions.values()
        figures = ["-"] * 5 if outcome.report is None else key_figures(outcome.report)
        verdict = "[red]fail" if outcome.failures else "[green]pass"
        table.add_row(*asked, *figures, f"{outcome.seconds:.0f}", verdict)
    return table


def key_figures(report: dict[str, Any]) -> list[str]:
    """Records missing, codes as in the rollout (guided, RTN), log-prob gap (guided, RTN)."""
    gap, code = report["logprob_gap"], report["code_agreement"]
    missing = report["records"]["missing"] + report["records_after_update"]["missing"]
    return [
        str(missing),
        f"{code['guided']:.3%}",
        f"{code['rtn']:.3%}",
        f"{gap['guided_1bit_all_layers']['mean']:.4f}",
        f"{gap['rtn']['mean']:.4f}",
    ]


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Which runs gave the same, bit for bit."""
    table = Table(
        title="Equal, bit for bit", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for column in ("on", "between", "rollout", "records", "trainer", ""):
        table.add_column(column)
    for each in comparisons:
        equal = ["yes" if same else "no" for same in (each.rollout, each.records, each.trainer)]
        verdict = "[green]pass" if each.passed else "[red]fail"
        row = (each.shared, ", ".join(each.versions), *equal, verdict if each.required else "")
        table.add_row(*row)
    return table


def as_json(outcomes: Sequence[Outcome], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Everything the tables show, the sentences of what failed, and the demo's whole reports."""
    return {
        "runs": [
            {
                "versions": outcome.combination.versions,
                "failures": list(outcome.failures),
                "seconds": outcome.seconds,
                "report": outcome.report,
            }
            for outcome in outcomes
        ],
        "equal": [asdict(each) for each in comparisons],
    }
