"""What FP4 and guidance cost a training step on one GPU, beside the same step in BF16.

Layers of Qwen3-30B-A3B's shape with Transformer Engine's grouped experts; forward, backward and
optimizer step. The modes take turns on one model and on the same micro-batches, and all replay the
recorded routes: grouped GEMMs of the same shapes, on the same machine.

  bf16        FP4 off
  nearest     experts, keys and values in FP4, rounded to nearest
  guided      records of fc1, K and V followed in every layer
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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command_line import command_line
from benchmarks.gpu_timing import git_commit
from benchmarks.trainer_step.live import measure_live
from benchmarks.trainer_step.model import SEQUENCE, VOCABULARY, Trainer, start_one_rank
from benchmarks.trainer_step.records import random_records
from bridge.client.records import TrajectoryRecords
from bridge.layout import RecordLayout, Site
from megatron_trace import (
    Guidance,
    GuidedMicroBatch,
    TraceTrainerConfig,
    disable_fp4,
    enable_fp4,
    free_rounded_weights,
    guide,
)
from megatron_trace.enable import shape_of

SITES: dict[str, tuple[Site, ...]] = {
    "bf16": (Site.ROUTES,),
    "nearest": (Site.ROUTES,),
    "guided": (Site.FC1, Site.K, Site.V, Site.ROUTES),
    "guided_fc2": (Site.FC1, Site.FC2, Site.K, Site.V, Site.ROUTES),
}
MODES = (*SITES, "live")
MICRO_BATCHES = 3
LIVE_STEPS = 10


def layout_of(trainer: Trainer, sites: tuple[Site, ...], layers: int) -> RecordLayout:
    """One bit of every layer."""
    return RecordLayout(shape_of(trainer.model.config), tuple(range(layers)), sites, bits=1)


@dataclass
class Recorded:
    """Tokens of a micro-batch and records of every site, from which each mode takes its own."""

    tokens: Tensor
    records: list[TrajectoryRecords]

    @classmethod
    def random(cls, trainer: Trainer, shape: tuple[int, int], layers: int) -> Recorded:
        layout = layout_of(trainer, SITES["guided_fc2"], layers)
        tokens = torch.randint(VOCABULARY, shape)
        return cls(tokens, [random_records(f"t{i}", row, layout) for i, row in enumerate(tokens)])

    def micro_batch(self, mode: str) -> GuidedMicroBatch:
        return GuidedMicroBatch.from_records(
            self.records,
            self.tokens,
            weight_version="1",
            guidance=Guidance(sites=SITES[mode]),
            device="cuda",
        )


def milliseconds(trainer: Trainer, batch: GuidedMicroBatch, tokens: Tensor) -> float:
    """One step between two events."""
    trainer.tokens = tokens.cuda()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with guide(batch):
        trainer.step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@contextmanager
def in_mode(trainer: Trainer, mode: str) -> Iterator[None]:
    """Switch on what a mode computes, and off again."""
    is_fp4 = mode != "bf16"
    enable_fp4(trainer.model, TraceTrainerConfig(experts=is_fp4, kv_cache=is_fp4))
    yield
    free_rounded_weights(trainer.model)
    disable_fp4(trainer.model)


def measure(
    trainer: Trainer, recorded: list[Recorded], rounds: int, modes: list[str]
) -> list[dict[str, Any]]:
    """All modes but live on these micro-batches."""
    batches = {mode: [each.micro_batch(mode) for each in recorded] for mode in modes}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    peaks = dict.fromkeys(modes, 0)
    for turn in range(rounds + 1):
        for mode in modes:
            with in_mode(trainer, mode):
                pairs = list(zip(batches[mode], recorded, strict=True))
                milliseconds(trainer, pairs[0][0], pairs[0][1].tokens)  # after the switch
                torch.cuda.reset_peak_memory_stats()
                elapsed = [milliseconds(trainer, batch, each.tokens) for batch, each in pairs]
                peaks[mode] = max(peaks[mode], torch.cuda.max_memory_allocated())
            if turn:
                times[mode] += elapsed
    return [
        {
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
    return {"mode": "live", **found}


def profile(trainer: Trainer, recorded: Recorded, mode: str) -> None:
    """Print where one step spends the device's and the host's time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    batch = recorded.micro_batch(mode)
    with in_mode(trainer, mode):
        milliseconds(trainer, batch, recorded.tokens)
        with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            milliseconds(trainer, batch, recorded.tokens)
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
        chosen = modes.split(",")
        recorded = [Recorded.random(trainer, shape, layers) for _ in range(MICRO_BATCHES)]
        found_rows = measure(trainer, recorded, rounds, [mode for mode in chosen if mode in SITES])
        if "live" in chosen:
            trainer.tokens = recorded[0].tokens
            found_rows.append(live(trainer, layers))
        for row in found_rows:
            rows.append({"layers": layers, "tokens": size, **row})
            print(json.dumps(rows[-1]), flush=True)
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
        profile(trainer, recorded[0], mode)


if __name__ == "__main__":
    typer.run(main)
