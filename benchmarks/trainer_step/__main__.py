"""What FP4 and guidance cost a training step on one GPU, beside the same step in BF16.

Layers of Qwen3-30B-A3B's shape with Transformer Engine's grouped experts; forward, backward and
optimizer step. The modes take turns on one model, so that all see the same machine:

  bf16        FP4 off
  nearest     experts, keys and values in FP4, rounded to nearest
  guided      records of fc1, K, V and routes followed in every layer
  guided_fc2  fc2 too
  live        as guided, each step with records of its own that a running bridge sends; `waited_ms`
              is how long a step waited for them

A figure is the median over rounds of one step between two events. Peak memory is that of a mode's
steps: parameters, FP32 gradients, Adam's state and activations included.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command_line import command_line
from benchmarks.gpu_timing import git_commit
from benchmarks.trainer_step.live import measure_live
from benchmarks.trainer_step.model import SEQUENCE, VOCABULARY, Trainer, start_one_rank
from benchmarks.trainer_step.records import random_records
from bridge.layout import RecordLayout, Site
from megatron_trace import (
    Guidance,
    GuidedMicroBatch,
    disable_fp4,
    enable_fp4,
    free_rounded_weights,
    guide,
)
from megatron_trace.enable import shape_of

SITES = {
    "guided": (Site.FC1, Site.K, Site.V, Site.ROUTES),
    "guided_fc2": (Site.FC1, Site.FC2, Site.K, Site.V, Site.ROUTES),
}
MODES = ("bf16", "nearest", *SITES, "live")
LIVE_STEPS = 10


def layout_of(trainer: Trainer, sites: tuple[Site, ...], layers: int) -> RecordLayout:
    """One bit of every layer."""
    return RecordLayout(shape_of(trainer.model.config), tuple(range(layers)), sites, bits=1)


def micro_batch(trainer: Trainer, sites: tuple[Site, ...], layers: int) -> GuidedMicroBatch:
    """Records of all layers for the trainer's tokens."""
    layout = layout_of(trainer, sites, layers)
    tokens = trainer.tokens.cpu()
    records = [random_records(f"t{i}", row, layout) for i, row in enumerate(tokens)]
    return GuidedMicroBatch.from_records(
        records, trainer.tokens, weight_version="1", guidance=Guidance()
    )


def milliseconds(trainer: Trainer, batch: GuidedMicroBatch | None) -> float:
    """One step between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with nullcontext() if batch is None else guide(batch):
        trainer.step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@contextmanager
def in_mode(trainer: Trainer, mode: str) -> Iterator[None]:
    """Switch FP4 on for every mode but BF16, and off again."""
    if mode != "bf16":
        enable_fp4(trainer.model)
    yield
    free_rounded_weights(trainer.model)
    disable_fp4(trainer.model)


def measure(trainer: Trainer, layers: int, rounds: int, modes: list[str]) -> list[dict[str, Any]]:
    """All modes but live at the trainer's number of tokens."""
    batches = {mode: micro_batch(trainer, SITES[mode], layers) for mode in modes if mode in SITES}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    peaks = dict.fromkeys(modes, 0)
    for turn in range(rounds + 1):
        for mode in modes:
            with in_mode(trainer, mode):
                milliseconds(trainer, batches.get(mode))  # after the switch
                torch.cuda.reset_peak_memory_stats()
                elapsed = [milliseconds(trainer, batches.get(mode)) for _ in range(3)]
                peaks[mode] = max(peaks[mode], torch.cuda.max_memory_allocated())
            if turn:
                times[mode] += elapsed
    return [
        {
            "layers": layers,
            "tokens": trainer.tokens.numel(),
            "mode": mode,
            "ms": round(statistics.median(times[mode]), 2),
            "ms_least": round(min(times[mode]), 2),
            "peak_gb": round(peaks[mode] / 1e9, 3),
        }
        for mode in modes
    ]


def live(trainer: Trainer, layers: int) -> dict[str, Any]:
    """Guided steps with records from a running bridge."""
    layout = layout_of(trainer, SITES["guided"], layers)
    with in_mode(trainer, "live"):
        found = measure_live(trainer, layout, LIVE_STEPS)
    return {"layers": layers, "tokens": trainer.tokens.numel(), "mode": "live", **found}


def profile(trainer: Trainer, layers: int, mode: str) -> None:
    """Print where one step spends the device's and the host's time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    batch = micro_batch(trainer, SITES[mode], layers) if mode in SITES else None
    with in_mode(trainer, mode):
        milliseconds(trainer, batch)
        with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            milliseconds(trainer, batch)
    averages = found.key_averages()
    print(averages.table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))
    print(averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=70))


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios that users ask for, by number of tokens."""
    found = []
    for tokens in sorted({row["tokens"] for row in rows}):
        ms = {row["mode"]: row["ms"] for row in rows if row["tokens"] == tokens}
        gb = {row["mode"]: row.get("peak_gb", 0) for row in rows if row["tokens"] == tokens}
        pairs = [("nearest", "bf16"), ("guided", "nearest"), ("guided_fc2", "nearest")]
        pairs.append(("guided", "bf16"))
        entry: dict[str, Any] = {"tokens": tokens}
        for mode, base in pairs:
            if mode in ms and base in ms:
                entry[f"{mode}/{base}"] = round(ms[mode] / ms[base], 3)
                entry[f"{mode}-{base}_gb"] = round(gb[mode] - gb[base], 3)
        found.append(entry)
    return found


def main(
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 2,
    tokens: Annotated[str, typer.Option(help="Tokens a step, separated by commas.")] = "8192,16384",
    rounds: Annotated[int, typer.Option(help="Turns of all modes, three steps each.")] = 5,
    modes: Annotated[str, typer.Option(help="Modes, separated by commas.")] = ",".join(MODES),
    profiled: Annotated[str, typer.Option(help="Print a profile of these modes.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Time training steps in BF16, FP4 and guided FP4."""
    start_one_rank()
    trainer = Trainer.build(layers)
    rows: list[dict[str, Any]] = []
    for size in map(int, tokens.split(",")):
        shape = (size // SEQUENCE, SEQUENCE)
        trainer.tokens = torch.randint(VOCABULARY, shape, device="cuda")
        chosen = modes.split(",")
        found_rows = measure(trainer, layers, rounds, [mode for mode in chosen if mode != "live"])
        if "live" in chosen:
            found_rows.append(live(trainer, layers))
        for row in found_rows:
            rows.append(row)
            print(json.dumps(row), flush=True)
    found = {
        "name": "trainer_step",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": command_line("benchmarks.trainer_step"),
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton", "megatron-core")},
        "rows": rows,
        "ratios": ratios(rows),
    }
    print(json.dumps(found["ratios"]), flush=True)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    for mode in filter(None, profiled.split(",")):
        print(f"--- {mode}")
        profile(trainer, layers, mode)


if __name__ == "__main__":
    typer.run(main)
