"""What capture costs decode and prefill on a GPU, and what FP4 experts gain, on one card.

Qwen3-30B-A3B's shape, 48 layers, dummy weights. The servers of a group run at once and take turns
at the same batch, so that all see the same machine; an idle one uses neither the GPU nor a core. A
batch is groups of samples of the same prompts, as in GRPO. It is sampled at temperature 1: greedy
replies of random weights soon repeat the same few tokens, which all go to the same few experts.
`same_replies` counts greedy replies that are equal to the base's.

The rates are those that the schedulers log every 20 decode steps, without the first interval after
a prefill and the one in which requests end; steps of two servers are compared at the same number of
tokens in the KV pool. `batch_ratio` compares whole batches: HTTP, a prefill of a few tokens a
request, decode, and all requests ending at once, which no rollout does. `prefill_tokens_per_s` is
of prompts that no cache knows, with one token sampled.

Groups, each with its base first: `experts` (BF16, then FP4), `capture` (fc1 and routes, then fc2
too) and `kv` (fc1, K, V and routes, over an NVFP4 KV cache). Rows of other groups stay in the JSON.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.command_line import command_line
from benchmarks.engine.qwen3_30b_a3b import CONFIG, write_model
from benchmarks.gpu_timing import git_commit
from bridge.client.client import TraceClient
from bridge.daemon import spawn
from examples.demo.server import Server

BATCHES = (128, 32, 8, 1)
CONTEXT = 4096
PROMPTS = 8
GREEDY_TOKENS = 32
# A batch of prompts that are prefilled without any cache.
PREFILLED = 8
REPORT = re.compile(r"#running-req: (\d+), #token: (\d+),.*gen throughput \(token/s\): ([\d.]+)")
# By batch and setting.
Whole = dict[tuple[int, str], dict[str, Any]]
FLAGS = [
    *("--load-format", "dummy", "--skip-tokenizer-init", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "120000", "--max-running-requests", "128"),
    *("--chunked-prefill-size", "8192", "--disable-prefill-cuda-graph", "--sleep-on-idle"),
    *("--cuda-graph-bs-decode", *map(str, sorted(BATCHES)), "--decode-log-interval", "20"),
]
FP4 = ["--quantization", "trace_nvfp4"]
TRITON = ["--attention-backend", "triton"]
FP4_KV = ["--attention-backend", "trace_fp4", "--kv-cache-dtype", "nvfp4"]


def capturing(sites: str) -> list[str]:
    """The flags that record these sites."""
    return ["--trace-capture", "--trace-sites", sites]


# The first setting of a group is what its others are compared with.
GROUPS = {
    "experts": {"bf16 experts": TRITON, "fp4 experts": [*TRITON, *FP4]},
    "capture": {
        "off": [*TRITON, *FP4],
        "fc1,routes": [*TRITON, *FP4, *capturing("fc1,routes")],
        "fc1,fc2,routes": [*TRITON, *FP4, *capturing("fc1,fc2,routes")],
    },
    "kv": {
        "off": [*FP4_KV, *FP4],
        "fc1,k,v,routes": [*FP4_KV, *FP4, *capturing("fc1,k,v,routes")],
    },
}
# Bits of an expert's weight, NVFP4 with its block scale.
WEIGHT_BITS = {"bf16 experts": 16.0, "fp4 experts": 4.5}


def expert_bytes(batch: int, bits: float, layers: int) -> int:
    """Bytes of the expert weights that a decode step reads if every token's routes are random.

    Of E experts a token takes K: one is used by none of B tokens with probability (1 - K/E)^B.
    """
    experts, taken = CONFIG["num_experts"], CONFIG["num_experts_per_tok"]
    used = experts * (1 - (1 - taken / experts) ** batch)
    weights = 3 * CONFIG["hidden_size"] * CONFIG["moe_intermediate_size"]
    return round(layers * used * weights * bits / 8)


def random_tokens(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 150_000, (count, length), generator=generator).tolist()


class Batch:
    """Sends one batch to a server, again and again."""

    def __init__(self, size: int) -> None:
        prompts = random_tokens(PROMPTS, CONTEXT, seed=0)
        self.size = size
        self._prompts = [prompts[number % PROMPTS] for number in range(size)]
        self._sent = 0

    def seconds(
        self, server: Server, new_tokens: int, temperature: float = 1.0
    ) -> tuple[float, list[list[int]]]:
        """Return the time of the whole batch and the sampled tokens."""
        self._sent += 1
        body = {
            "input_ids": self._prompts,
            "rid": [f"b{self.size}-{self._sent}/{number}" for number in range(self.size)],
            "sampling_params": {
                "max_new_tokens": new_tokens,
                "temperature": temperature,
                "ignore_eos": True,
            },
        }
        started = time.perf_counter()
        replies = server.post("/generate", body)
        return time.perf_counter() - started, [reply["output_ids"] for reply in replies]


@dataclass(frozen=True)
class Interval:
    """A scheduler's report on 20 decode steps of a full batch; `tokens` are in the KV pool."""

    batch: int
    tokens: int
    ms_per_step: float


def intervals(log: str) -> list[Interval]:
    """Read a server's log."""
    found = []
    fresh = False
    for line in log.splitlines():
        if "Prefill batch" in line:
            fresh = True
        elif match := REPORT.search(line):
            batch, tokens, rate = int(match[1]), int(match[2]), float(match[3])
            if not fresh and tokens:
                found.append(Interval(batch, tokens, 1000 * batch / rate))
            fresh = False
    return found


def compare(off: list[Interval], on: list[Interval]) -> float:
    """Return throughput with capture by throughput without, the median over intervals."""
    off = sorted(off, key=lambda each: each.tokens)
    base = np.interp(
        [each.tokens for each in on],
        [each.tokens for each in off],
        [each.ms_per_step for each in off],
    )
    return float(np.median(base / [each.ms_per_step for each in on]))


def rows_of(logs: dict[str, str]) -> list[dict[str, Any]]:
    """One row a batch and setting, from the servers' logs; the first is the base."""
    read = {name: intervals(log) for name, log in logs.items()}
    base = next(iter(read))
    rows = []
    for size in BATCHES:
        mine = {name: [i for i in found if i.batch == size] for name, found in read.items()}
        for name, found in mine.items():
            if found and mine[base]:
                ms = statistics.median(each.ms_per_step for each in found)
                rows.append(
                    {
                        "setting": name,
                        "batch": size,
                        "context": CONTEXT,
                        "intervals": len(found),
                        "ms_per_step": round(ms, 4),
                        "tokens_per_s": round(1000 * size / ms, 1),
                        "throughput_ratio": round(compare(mine[base], found), 4),
                    }
                )
    return rows


def ratio(base: list[float], mine: list[float]) -> float:
    """Speed by the base's, the median over rounds."""
    return round(statistics.median(a / b for a, b in zip(base, mine, strict=True)), 4)


def whole_batches(servers: dict[str, Server], size: int, rounds: int, tokens: int) -> Whole:
    """Send a batch to every server in turn; returns what the logs do not say."""
    batch = Batch(size)
    times: dict[str, list[float]] = {name: [] for name in servers}
    greedy = {
        name: batch.seconds(server, GREEDY_TOKENS, temperature=0.0)[1]
        for name, server in servers.items()
    }
    for _ in range(rounds):
        for name, server in servers.items():
            times[name].append(batch.seconds(server, tokens)[0])
    base = next(iter(servers))
    return {
        (size, name): {
            "batch_ratio": ratio(times[base], mine),
            "same_replies": sum(a == b for a, b in zip(greedy[base], greedy[name], strict=True)),
        }
        for name, mine in times.items()
    }


def prefills(servers: dict[str, Server], rounds: int) -> list[dict[str, Any]]:
    """A row a server: whole prompts that no cache knows, one token sampled, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        prompts = random_tokens(PREFILLED, CONTEXT, seed=100 + number)
        for name, server in servers.items():
            body = {
                "input_ids": prompts,
                "rid": [f"prefill-{number}/{each}" for each in range(PREFILLED)],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            }
            started = time.perf_counter()
            server.post("/generate", body)
            times[name].append(time.perf_counter() - started)
    measured = {name: mine[1:] for name, mine in times.items()}
    base = next(iter(servers))
    return [
        {
            "setting": name,
            "prefill": PREFILLED,
            "context": CONTEXT,
            "prefill_tokens_per_s": round(PREFILLED * CONTEXT / statistics.median(mine)),
            "prefill_ratio": ratio(measured[base], mine),
        }
        for name, mine in measured.items()
    ]


def missing(bridge: str) -> dict[str, int]:
    """What a capturing server's bridge holds and lacks."""
    time.sleep(0.5)  # what the shipper has not sent yet
    with TraceClient(bridge) as client:
        told, stats = list(client.list_trajectories()), client.stats()
        return {
            "trajectories": len(told),
            "rows": sum(each.rows for each in told),
            "rows_missing": sum(each.missing_forward for each in told),
            "stored_rows": stats.forward_rows,
            "stored_bytes": stats.memory_bytes + stats.disk_bytes,
        }


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an earlier run, those of the new rows' group replaced."""
    groups = {row["group"] for row in new}
    return [row for row in old if row.get("group") not in groups] + new


def report(rows: list[dict[str, Any]], commit: str, layers: int) -> dict[str, Any]:
    """The JSON."""
    return {
        "name": "capture_gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command_line("benchmarks.engine.capture_gpu"),
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        "layers": layers,
        "rows": rows,
    }


@dataclass
class Group:
    """The servers of a group and the bridges of those that capture."""

    servers: dict[str, Server]
    bridges: dict[str, str]

    @classmethod
    def start(cls, name: str, model: Path, folder: Path, ending: ExitStack) -> Group:
        """Start all at once; `ending` stops them."""
        group = cls({}, {})
        for number, (setting, flags) in enumerate(GROUPS[name].items()):
            flags = [*FLAGS, *flags]
            if "--trace-capture" in flags:
                bridge = spawn.start(memory_limit="32GiB")
                ending.callback(bridge.stop)
                group.bridges[setting] = bridge.endpoint
                flags += ["--trace-bridge", bridge.endpoint]
            log = folder / f"{name}-{number}.log"
            group.servers[setting] = Server(model, log, flags)
            ending.callback(group.servers[setting].stop)
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.start, group.servers.values()))
        return group

    def logs(self) -> dict[str, str]:
        """What the schedulers have printed so far."""
        return {name: server.log.read_text() for name, server in self.servers.items()}

    def held(self) -> dict[str, dict[str, int]]:
        """What the bridges hold and lack."""
        return {name: missing(endpoint) for name, endpoint in self.bridges.items()}


def with_bytes(row: dict[str, Any], layers: int) -> dict[str, Any]:
    """The row of an `experts` setting with the weights that its step reads."""
    bits = WEIGHT_BITS.get(row["setting"])
    if bits is None or "batch" not in row:
        return row
    return row | {"expert_bytes_if_routed_evenly": expert_bytes(row["batch"], bits, layers)}


def measure(group: Group, rounds: int, tokens: int, layers: int) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows so far, after the prefills and after every batch."""
    prefilled = prefills(group.servers, rounds)
    yield prefilled
    whole: Whole = {}
    for size in BATCHES:
        whole |= whole_batches(group.servers, size, rounds, tokens)
        decoded = [row | whole[row["batch"], row["setting"]] for row in rows_of(group.logs())]
        rows = [with_bytes(row, layers) for row in (*prefilled, *decoded)]
        held = group.held()
        yield [
            row | {"held": held[row["setting"]]} if row["setting"] in held else row for row in rows
        ]


def main(
    out: Annotated[Path, typer.Option(help="JSON to merge into.")] = Path(
        "benchmarks/results/h200/capture_gpu.json"
    ),
    groups: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(GROUPS),
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 2,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a reply.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 48,
    commit: Annotated[str, typer.Option(help="What is measured; default: ask git.")] = "",
) -> None:
    """Measures the servers of each group against its base; writes JSON after every batch."""
    names = groups.split(",")
    if unknown := [name for name in names if name not in GROUPS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(GROUPS)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    commit = commit or git_commit()
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", num_hidden_layers=layers)
        for name in names:
            with ExitStack() as ending:
                group = Group.start(name, model, Path(folder), ending)
                print(f"{name}: servers ready", flush=True)
                for rows in measure(group, rounds, tokens, layers):
                    told = {"group": name, "commit": commit}
                    new = merged(old, [told | row for row in rows])
                    for row in rows[-len(GROUPS[name]) :]:
                        print(json.dumps(told | row), flush=True)
                    # After every batch, so that a run that is cut short has what it measured.
                    out.write_text(json.dumps(report(new, commit, layers), indent=1) + "\n")
            old = new


if __name__ == "__main__":
    typer.run(main)
