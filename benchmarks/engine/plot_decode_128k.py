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
    """Tokens per second by context, one bar per configuration, its batch inside."""
    contexts = sorted({row["context"] for mine in rows.values() for row in mine})
    width = 0.85 / len(rows)
    for number, (name, mine) in enumerate(rows.items()):
        by_context = {row["context"]: row for row in mine}
        at = [place for place, context in enumerate(contexts) if context in by_context]
        found = [by_context[contexts[place]] for place in at]
        offset = (number - (len(rows) - 1) / 2) * width
        bars = axes.bar(
            [place + offset for place in at],
            [row["tokens_per_s"] for row in found],
            width,
            label=LABELS[name],
        )
        texts = [f"{row['tokens_per_s']:,.0f} ({row['batch']})" for row in found]
        axes.bar_label(bars, texts, rotation=90, fontsize=6, padding=2)
    axes.set_yscale("log")
    axes.set_ylim(top=5 * max(row["tokens_per_s"] for mine in rows.values() for row in mine))
    axes.set_xticks(range(len(contexts)), [f"{context // 1024}K" for context in contexts])
    axes.set(xlabel="tokens of context", ylabel="tokens per second")
    axes.set_title("Decode with all memory used (sequences that fit)", fontsize=10)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
    axes.legend(fontsize=7, ncols=3, frameon=False, **below)


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
    axes.set(xlabel="ms per token: the time of a step over its batch (in brackets)")
    axes.set_title(f"Where the time goes at {longest // 1024}K", fontsize=10)
    if at:
        below = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.16)}
        axes.legend(fontsize=7, ncols=len(PARTS), columnspacing=1.0, frameon=False, **below)


def draw(report: dict[str, Any], out: Path) -> None:
    """Write the picture.

    Raises:
        ValueError: no row has a figure.
    """
    rows = measured(report)
    if not rows:
        raise ValueError("No row of the JSON has a rate: run benchmarks.engine.decode_128k first.")
    figure, (rates, step) = plt.subplots(1, 2, figsize=(11.5, 4.6), dpi=110)
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
