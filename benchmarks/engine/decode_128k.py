"""Decode throughput at long contexts by what is kept in FP4, the batch as large as memory allows.

Qwen3-30B-A3B's shape, dummy weights. Every configuration has the same memory fraction, runs in a
process of its own and decodes the largest batch of every context that fits into its KV pool. The
pool is filled directly (`benchmarks.engine.decode_engine` says how): prefilling 650,000 tokens
takes three minutes, and what decode costs does not depend on it. There is no scheduler and no HTTP.

`ratio_to_bf16` is to the fastest of the configurations in BF16 at the same context. `capture_ms`
is the step with capture less the step without, at the same batch. `kv_limit_ms` is what reading
the batch's keys and values takes at the rate of a copy in the same process. Rows are merged into
the JSON as they come, each with its date and commit, so that a run may measure a part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command_line import command_line
from benchmarks.engine.decode_engine import ROW
from benchmarks.engine.qwen3_30b_a3b import TINY, write_model
from benchmarks.gpu_timing import git_commit
from bridge.client.client import TraceClient
from bridge.daemon import spawn
from sglang_trace.config import TraceConfig, parse_sites
from sglang_trace.preflight.unsupported import GPU_RELEASE

NAME = "decode_128k"
CONTEXTS = (8192, 32768, 65536, 131072)
# Beyond the longest context: the tokens that are decoded.
CONTEXT_LENGTH = CONTEXTS[-1] + 1024
BASE = "bf16"


@dataclass(frozen=True)
class Configuration:
    """What is quantized; `attention` is the backend on a GPU."""

    attention: str
    kv_cache: str = "auto"
    quantization: str | None = None
    capture: bool = False

    def flags(self, on_gpu: bool) -> list[str]:
        """SGLang's arguments."""
        flags = ["--kv-cache-dtype", self.kv_cache]
        flags += ["--attention-backend", self.attention] if on_gpu else []
        return flags + (["--quantization", self.quantization] if self.quantization else [])


FP4_EXPERTS = "trace_nvfp4"
CONFIGURATIONS = {
    BASE: Configuration("flashinfer"),
    "bf16-triton": Configuration("triton"),
    "fp8-kv": Configuration("flashinfer", "fp8_e4m3"),
    "fp4-kv": Configuration("trace_fp4", "nvfp4"),
    "fp4": Configuration("trace_fp4", "nvfp4", FP4_EXPERTS),
    "fp4+capture": Configuration("trace_fp4", "nvfp4", FP4_EXPERTS, capture=True),
}
CAPTURING, QUIET = "fp4+capture", "fp4"


def server_flags(
    chosen: Configuration, on_gpu: bool, tiny: bool, memory: float, page_size: int
) -> list[str]:
    """All of SGLang's arguments but the model."""
    flags = [
        *("--load-format", "dummy", "--skip-tokenizer-init", "--sampling-backend", "pytorch"),
        *("--disable-prefill-cuda-graph", "--chunked-prefill-size", "8192"),
        *("--mem-fraction-static", str(memory), "--max-running-requests", "512"),
        *("--page-size", str(page_size)),
        *chosen.flags(on_gpu),
    ]
    if tiny:
        flags += ["--max-total-tokens", "4096"]
    return flags


# --- results


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a newer row takes the place of."""
    return row["configuration"], row["context"], row["page_size"]


def merged(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """`rows` with the new one in its place, and with the figures that compare rows."""
    kept = [row for row in rows if key_of(row) != key_of(new)]
    return compared([*kept, new])


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `ratio_to_bf16` and `capture_ms`, where there is what to compare with."""
    order = {name: number for number, name in enumerate(CONFIGURATIONS)}
    rows = sorted(rows, key=lambda row: (order.get(row["configuration"], 99), row["context"]))
    best: dict[int, float] = {}
    steps: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if "tokens_per_s" not in row:
            continue
        if row["configuration"].startswith(BASE):
            best[row["context"]] = max(best.get(row["context"], 0.0), row["tokens_per_s"])
        steps[key_of(row), row["batch"]] = row["ms_per_step"]
    found = []
    for row in rows:
        row = {name: value for name, value in row.items() if name not in COMPARING}
        if "tokens_per_s" in row and row["context"] in best:
            row["ratio_to_bf16"] = round(row["tokens_per_s"] / best[row["context"]], 3)
        if row["configuration"] == CAPTURING and "tokens_per_s" in row:
            quiet = steps.get(((QUIET, *key_of(row)[1:]), row["batch"]))
            if quiet is not None:
                row["capture_ms"] = round(row["ms_per_step"] - quiet, 4)
                row["capture_ratio"] = round(quiet / row["ms_per_step"], 4)
        found.append(row)
    return found


COMPARING = ("ratio_to_bf16", "capture_ms", "capture_ratio")


def with_limit(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the time that reading its keys and values takes at least."""
    if "copy_gb_per_s" not in row or "batch" not in row:
        return row
    nbytes = row["batch"] * row["context"] * row["kv_bytes_per_token"]
    return row | {"kv_limit_ms": round(nbytes / row["copy_gb_per_s"] / 1e6, 4)}


def read_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run."""
    return json.loads(out.read_text())["rows"] if out.exists() else []


def report(rows: list[dict[str, Any]], commit: str, **more: Any) -> dict[str, Any]:
    """The JSON."""
    on_gpu = torch.cuda.is_available()
    return {
        "name": NAME,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command_line(f"benchmarks.{NAME}"),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        "filled": "KV pool filled with random content, not prefilled; no scheduler, no HTTP",
        **more,
        "rows": rows,
    }


# --- one configuration


def model_of(folder: Path, tiny: bool, layers: int) -> Path:
    """A model that takes the longest context and the tokens that are decoded after it."""
    changes: dict[str, Any] = {"max_position_embeddings": CONTEXT_LENGTH, **(TINY if tiny else {})}
    if layers:
        changes["num_hidden_layers"] = layers
    return write_model(folder, **changes)


def run(command: list[str], environment: dict[str, str], log: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that the engine's process prints; the rest goes to its log.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    with log.open("w") as rest:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=rest,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(ROW):
                    yield json.loads(line.removeprefix(ROW))
                else:
                    rest.write(line)
                    rest.flush()
            process.wait()
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {reason(log.read_text())}")


def reason(log: str) -> str:
    """The last line of a log that looks like why a process ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Refus" in line or "Not" in line]
    return (errors or lines or ["it printed nothing"])[-1][:500]


def recorded(bridge: str, rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many rows a process should have sent in all, and how many its bridge holds."""
    expected = sum(row["batch"] * row["steps_recorded"] for row in rows)
    with TraceClient(bridge) as client:
        return {"run_rows_sent": expected, "run_rows_held": client.stats().forward_rows}


def measure(
    name: str,
    model: Path,
    contexts: list[int],
    steps: int,
    server: list[str],
    sites: str,
    log: Path,
) -> Iterator[dict[str, Any]]:
    """Yield a row a context; a context without one gets a row that says why.

    The last one of a process that captures comes twice.
    """
    command = [
        *(sys.executable, "-m", "benchmarks.engine.decode_engine", "--model", str(model)),
        *("--contexts", ",".join(map(str, contexts)), "--steps", str(steps)),
        *("--server", json.dumps(server)),
    ]
    missing = dict.fromkeys(contexts, "the process ended early")
    decoded: list[dict[str, Any]] = []
    with ExitStack() as ending:
        environment: dict[str, str] = {}
        if CONFIGURATIONS[name].capture:
            daemon = spawn.start(memory_limit="16GiB")
            ending.callback(daemon.stop)
            environment = TraceConfig(daemon.endpoint, parse_sites(sites)).to_environment()
        try:
            for row in run(command, environment, log):
                del missing[row["context"]]
                row = with_limit(row)
                decoded += [row] if "batch" in row else []
                yield row
        except RuntimeError as error:
            missing = dict.fromkeys(missing, str(error))
        if environment and decoded:
            # Once more, with what can be counted at the end only.
            yield decoded[-1] | recorded(daemon.endpoint, decoded)
    for context, why in missing.items():
        yield {"context": context, "failed": why}


def main(
    out: Annotated[Path, typer.Option(help="JSON to merge into.")] = Path(
        f"benchmarks/results/h200/{NAME}.json"
    ),
    configs: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CONFIGURATIONS),
    contexts: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(map(str, CONTEXTS)),
    steps: Annotated[int, typer.Option(min=3, help="Measured steps.")] = 24,
    memory: Annotated[float, typer.Option(help="Memory fraction of weights and KV pool.")] = 0.9,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page of the pool.")] = 1,
    sites: Annotated[str, typer.Option(help="Sites that are captured.")] = "fc1,k,v,routes",
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; 0: its own.")] = 0,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model for a host without GPU.")] = False,
    logs: Annotated[Path | None, typer.Option(help="Where the engines' logs are kept.")] = None,
    commit: Annotated[str, typer.Option(help="What is measured; default: ask git.")] = "",
) -> None:
    """Measures every configuration at every context; writes JSON after every row."""
    names, lengths = configs.split(","), [int(context) for context in contexts.split(",")]
    if unknown := [name for name in names if name not in CONFIGURATIONS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(CONFIGURATIONS)}")
    if (release := version("sglang")) != GPU_RELEASE:
        raise typer.BadParameter(
            f"sglang {release} is installed and the model runner of {GPU_RELEASE} is driven: "
            f"install sglang=={GPU_RELEASE}."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    commit = commit or git_commit()
    rows = read_rows(out)
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(Path(folder) / "model", tiny, layers)
        place = logs or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            server = server_flags(CONFIGURATIONS[name], on_gpu, tiny, memory, page_size)
            log = place / f"{name}.log"
            for measured in measure(name, model, lengths, steps, server, sites, log):
                row = {
                    "configuration": name,
                    "page_size": page_size,
                    "memory_fraction": memory,
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "commit": commit,
                    **measured,
                }
                rows = merged(rows, row)
                shown = next(each for each in rows if key_of(each) == key_of(row))
                print(json.dumps(shown), flush=True)
                out.write_text(json.dumps(report(rows, commit), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
