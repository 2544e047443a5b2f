"""Draw what `decode_128k` measured: `python -m benchmarks.engine.plot_decode_128k JSON OUT.png`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

LABELS = {
    "bf16": "BF16",
    "bf16-triton": "BF16, Triton attention",
    "fp8-kv": "FP8 KV",
    "fp4-kv": "FP4 KV",
    "fp4": "FP4 W+A+KV",
    "fp4+capture": "FP4 W+A+KV, captured",
}
PARTS = ("attention", "experts", "rest", "copies", "idle")


def measured(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows that have a figure, by configuration and in the order of their contexts.

    Of several page sizes the one counts that most rows have.
    """
    rows = [row for row in report["rows"] if "tokens_per_s" in row]
    sizes = Counter(row["page_size"] for row in rows).most_common(1)
    rows = [row for row in rows if row["page_size"] == sizes[0][0]]
    found = {name: [row for row in rows if row["configuration"] == name] for name in LABELS}
    by_context = {
        name: sorted(mine, key=lambda row: row["context"]) for name, mine in found.items()
    }
    return {name: mine for name, mine in by_context.items() if mine}


def draw_rates(axes: Axes, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Tokens a second by context, the batch written at every point."""
    for name, mine in rows.items():
        contexts = [row["context"] / 1024 for row in mine]
        rates = [row["tokens_per_s"] for row in mine]
        axes.plot(contexts, rates, marker="o", markersize=4, label=LABELS[name])
        for row, x, y in zip(mine, contexts, rates, strict=True):
            axes.annotate(str(row["batch"]), (x, y), (3, 3), textcoords="offset points", size=6)
    ticks = sorted({row["context"] // 1024 for mine in rows.values() for row in mine})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick}K" for tick in ticks])
    axes.set(xlabel="tokens of context", ylabel="tokens a second", title="decode, batch at points")
    axes.legend(fontsize=7)


def draw_step(axes: Axes, rows: dict[str, list[dict[str, Any]]]) -> None:
    """The time of a token at the longest context, by part: a step over its batch."""
    longest = max(row["context"] for mine in rows.values() for row in mine)
    at = [
        row
        for mine in rows.values()
        for row in mine
        if row["context"] == longest and "split_ms" in row
    ]
    names = [f"{LABELS[row['configuration']]}\n({row['batch']})" for row in at]
    left = [0.0] * len(at)
    for part in PARTS:
        widths = [max(0.0, row["split_ms"][part]) / row["batch"] for row in at]
        axes.barh(names, widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xlabel="ms a token", title=f"step ÷ batch at {longest // 1024}K (batch)")
    if at:
        below = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.2)}
        axes.legend(fontsize=7, ncols=len(PARTS), columnspacing=1.0, frameon=False, **below)


def draw(report: dict[str, Any], out: Path) -> None:
    """Write the picture.

    Raises:
        ValueError: no row has a figure.
    """
    rows = measured(report)
    if not rows:
        raise ValueError("No row of the JSON has a rate: run benchmarks.engine.decode_128k first.")
    figure, (rates, step) = plt.subplots(1, 2, figsize=(9.5, 3.6), dpi=110)
    draw_rates(rates, rows)
    draw_step(step, rows)
    figure.suptitle(f"Qwen3-30B-A3B's shape, dummy weights, {report['device']}", size=9)
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)


def main(
    report: Annotated[Path, typer.Argument(help="JSON of benchmarks.engine.decode_128k.")],
    out: Annotated[Path, typer.Argument(help="PNG to write.")],
) -> None:
    """Draws throughput by context and the parts of the step at the longest."""
    draw(json.loads(report.read_text()), out)


if __name__ == "__main__":
    typer.run(main)
