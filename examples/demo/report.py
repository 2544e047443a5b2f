"""The demo's results for people: tables on the terminal and one picture, and JSON for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

NAMES = {
    "bf16": "BF16 on both sides",
    "rtn_own_routing": "FP4, round to nearest, own routing",
    "rtn": "FP4, round to nearest, routes replayed",
    "guided_1bit_deeper_half": "guided, 1 bit, deeper half",
    "guided_1bit_deeper_half_low_scales": "guided, 1 bit, 2-bit scales, deeper half",
    "guided_1bit_deeper_half_fc2": "guided, 1 bit, deeper half, with fc2",
    "guided_1bit_all_layers": "guided, 1 bit, all layers",
    "guided_1bit_all_layers_low_scales": "guided, 1 bit, 2-bit scales, all layers",
    "guided_1bit_all_layers_fc2": "guided, 1 bit, all layers, with fc2",
    "guided_full_code": "guided, full code, all layers, with fc2",
}
COLORS = {
    "rtn": "tab:gray",
    "guided_1bit_deeper_half_fc2": "tab:olive",
    "guided_1bit_all_layers_fc2": "tab:green",
}


def write(result: dict[str, Any], out: Path) -> None:
    """Writes report.json and report.png."""
    (out / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, out / "report.png")


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    console.print(_gap_table(result))
    console.print(_facts_table(result))


def _gap_table(result: dict[str, Any]) -> Table:
    table = Table(title="|log-prob gap| between rollout and trainer, nats per sampled token")
    table.add_column("trainer's rounding")
    for column in ("mean", "99 %", "max", "same codes"):
        table.add_column(column, justify="right", no_wrap=True)
    for key, gap in result["logprob_gap"].items():
        used = result["agreement"].get(key, {}).get("used")
        share = "" if used is None else f"{used:.3%}"
        table.add_row(NAMES[key], *(f"{gap[k]:.4f}" for k in ("mean", "p99", "max")), share)
    return table


def _facts_table(result: dict[str, Any]) -> Table:
    records, code = result["records"], result["code_agreement"]
    before, after = result["weights_before_update"], result["weights_after_update"]
    rollout, scales = result["rollout"], result["scales_of_two_bits"]["deeper_half"]
    table = Table(title="The main job", show_header=False)
    for name, value in {
        "trajectories, tokens": f"{rollout['trajectories']}, {rollout['tokens']}",
        "of them from the prefix cache": str(rollout["cached_tokens"]),
        "records missing": str(records["missing"] + result["records_after_update"]["missing"]),
        "bytes per token: record / formula / with the store's own": (
            f"{records['bytes_per_token']} / {records['bytes_per_token_formula']} / "
            f"{result['run']['stored_bytes_per_token']:.0f}"
        ),
        "code words as in the rollout, guided 1 bit": f"{code['guided']:.4%}",
        "the same, round to nearest": f"{code['rtn']:.4%}",
        "of its mismatches, one code word apart": (
            f"{code['adjacent_share_of_rtn_mismatches']:.3%}"
        ),
        "scales of 2 bits, deeper half: ambiguous, read wrong, of": (
            f"{scales['ambiguous_share']:.4%}, {scales['wrong_share']:.4%}, {scales['read']}"
        ),
        "expert matrices that differ, before / after the update": (
            f"{before['differing']} / {after['differing']} of {before['matrices']}"
        ),
        "GRPO step: loss, gradient norm": (
            f"{result['grpo_step']['loss']:.4f}, {result['grpo_step']['grad_norm']:.3f}"
        ),
        "same rollout whatever is captured": str(result["rollouts_equal_under_any_capture"]),
    }.items():
        table.add_row(name, value)
    return table


def draw(result: dict[str, Any], path: Path) -> None:
    """Left: the gap under every way to round. Right: code words unlike the rollout's, by layer."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    _draw_gaps(left, result)
    _draw_agreement(right, result)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_gaps(axes: Axes, result: dict[str, Any]) -> None:
    gaps = result["logprob_gap"]
    means = [gap["mean"] for gap in gaps.values()]
    colors = ["tab:green" if "guided" in key else "tab:gray" for key in gaps]
    bars = axes.barh([NAMES[key] for key in gaps], means, color=colors)
    axes.bar_label(bars, [f"{mean:.4f}" for mean in means], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title("Guided rounding (green) narrows the gap", fontsize=11)
    axes.set_xlabel("mean |log-prob gap|, nats per sampled token (less is better)")


def _draw_agreement(axes: Axes, result: dict[str, Any]) -> None:
    for key, color in COLORS.items():
        layers, shares = unlike_by_layer(result["agreement"][key]["by_site"])
        axes.plot(layers, shares, color=color, marker="o", label=NAMES[key])
    axes.set_yscale("symlog", linthresh=1e-5)
    axes.set_ylim(bottom=-2e-6)
    axes.set_xticks(layers)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of code words unlike the rollout's")
    axes.set_title("Guided layers round as the rollout did", fontsize=11)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
    axes.legend(fontsize=8, frameon=False, **below)


def unlike_by_layer(by_site: dict[str, list[dict[str, int]]]) -> tuple[list[int], list[float]]:
    """Return the layers, and the share of code words of all sites unlike the rollout's."""
    layers = [entry["layer"] for entry in next(iter(by_site.values()))]
    shares = []
    for layer in layers:
        entries = [entry for site in by_site.values() for entry in site if entry["layer"] == layer]
        agreeing = sum(entry["agree_used"] for entry in entries)
        shares.append(1 - agreeing / sum(entry["compared"] for entry in entries))
    return layers, shares
