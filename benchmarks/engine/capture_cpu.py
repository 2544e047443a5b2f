"""What capture costs the rollout on a CPU host: the same FP4 server with and without it.

Both servers run at once and take turns at the same batch, so that both see the same machine.
Tiny matrices on a CPU say nothing about a GPU; this watches for regressions of the host path
(staging, ledger, shipper, bridge).
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from benchmarks.command_line import command_line
from examples.demo import rollout
from examples.demo.pipeline import CAPTURE, FULL_CAPTURE, SERVER_FLAGS
from examples.demo.server import Server
from examples.tiny_model import make_checkpoint

FP4 = ["--quantization", "trace_nvfp4", "--kv-cache-dtype", "nvfp4"]
SETTINGS = {"off": FP4, "default": CAPTURE, "full": FULL_CAPTURE}


def seconds(server: Server, turn: int, new_tokens: int) -> float:
    """The time one batch takes; each turn has prompts of its own."""
    started = time.perf_counter()
    rollout.generate_groups(server, turn, 8, 2, new_tokens, seed=turn)
    return time.perf_counter() - started


def measure(folder: Path, rounds: int, new_tokens: int) -> dict[str, list[float]]:
    """Seconds of every round by setting, after one round to warm up."""
    model = make_checkpoint(folder / "model")
    servers = {
        name: Server(model, folder / f"{name}.log", [*SERVER_FLAGS, *flags])
        for name, flags in SETTINGS.items()
    }
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            seconds(server, 0, new_tokens)
        times: dict[str, list[float]] = {name: [] for name in servers}
        for turn in track(range(1, rounds + 1), "rounds", console=Console(stderr=True)):
            for name, server in servers.items():
                times[name].append(seconds(server, turn, new_tokens))
        return times
    finally:
        for server in servers.values():
            server.stop()


def result(times: dict[str, list[float]], new_tokens: int) -> dict[str, Any]:
    """The JSON: medians, and the ratio to no capture round by round."""
    tokens = 8 * 2 * new_tokens
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "name": "capture_cpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command_line("benchmarks.engine.capture_cpu"),
        "device": f"{platform.machine()} CPU",
        "versions": {name: version(name) for name in ("sglang", "torch")},
        "rows": [
            {
                "capture": name,
                "tokens_per_s": tokens / statistics.median(mine),
                "throughput_ratio": statistics.median(
                    off / on for off, on in zip(times["off"], mine, strict=True)
                ),
            }
            for name, mine in times.items()
        ],
    }


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/cpu/capture.json"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 7,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens sampled a request.")] = 64,
) -> None:
    """Measures decode throughput with capture off, default and full; writes JSON."""
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder), rounds, new_tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result(times, new_tokens), indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    typer.run(main)
