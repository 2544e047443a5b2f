"""What capture costs decode on a GPU: the same FP4 server with and without it, on one card.

Qwen3-30B-A3B's shape, 48 layers, dummy weights. All servers run at once and take turns at the same
batch, so that all see the same machine; an idle one uses neither the GPU nor a core. A batch is
groups of samples of the same 4,096-token prompts, as in GRPO.

The rates are those that the schedulers log every 20 decode steps, without the first interval after
a prefill and the one in which requests end; steps of two servers are compared at the same number of
tokens in the KV pool. `batch_ratio` compares whole batches: HTTP, a prefill of one token a request,
decode, and all requests ending at once, which no rollout does.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
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

from benchmarks.gpu_timing import git_commit
from bridge import embedded
from bridge.client import TraceClient
from examples.demo.server import Server

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
BATCHES = (128, 32, 8, 1)
CONTEXT = 4096
PROMPTS = 8
REPORT = re.compile(r"#running-req: (\d+), #token: (\d+),.*gen throughput \(token/s\): ([\d.]+)")
# By batch and setting.
Whole = dict[tuple[int, str], dict[str, Any]]
FLAGS = [
    *("--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend", "triton"),
    *("--max-total-tokens", "120000", "--max-running-requests", "128"),
    *("--chunked-prefill-size", "8192", "--disable-prefill-cuda-graph", "--sleep-on-idle"),
    *("--cuda-graph-bs-decode", *map(str, sorted(BATCHES)), "--decode-log-interval", "20"),
]
SETTINGS = {
    "off": ["--quantization", "trace_nvfp4"],
    "fc1,routes": ["--trace-capture", "--trace-sites", "fc1,routes"],
    "fc1,fc2,routes": ["--trace-capture", "--trace-sites", "fc1,fc2,routes"],
}


class Batch:
    """Sends one batch to a server, again and again."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, 150_000, (PROMPTS, CONTEXT), generator=generator).tolist()
        self.size = size
        self._prompts = [prompts[number % PROMPTS] for number in range(size)]
        self._sent = 0

    def seconds(self, server: Server, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Return the time of the whole batch and the sampled tokens."""
        self._sent += 1
        body = {
            "input_ids": self._prompts,
            "rid": [f"b{self.size}-{self._sent}/{number}" for number in range(self.size)],
            "sampling_params": {
                "max_new_tokens": new_tokens,
                "temperature": 0.0,
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
    """One row a batch and setting, from the servers' logs."""
    read = {name: intervals(log) for name, log in logs.items()}
    rows = []
    for size in BATCHES:
        mine = {name: [i for i in found if i.batch == size] for name, found in read.items()}
        for name, found in mine.items():
            if found and mine["off"]:
                ms = statistics.median(each.ms_per_step for each in found)
                rows.append(
                    {
                        "batch": size,
                        "context": CONTEXT,
                        "capture": name,
                        "intervals": len(found),
                        "ms_per_step": round(ms, 4),
                        "tokens_per_s": round(1000 * size / ms, 1),
                        "throughput_ratio": round(compare(mine["off"], found), 4),
                    }
                )
    return rows


def whole_batches(servers: dict[str, Server], size: int, rounds: int, tokens: int) -> Whole:
    """Send a batch to every server in turn; returns what the logs do not say."""
    batch = Batch(size)
    times: dict[str, list[float]] = {name: [] for name in servers}
    sampled: dict[str, list[list[int]]] = {}
    for server in servers.values():
        batch.seconds(server, 4)
    for _ in range(rounds):
        for name, server in servers.items():
            seconds, sampled[name] = batch.seconds(server, tokens)
            times[name].append(seconds)
    return {
        (size, name): {
            "batch_ratio": round(
                statistics.median(a / b for a, b in zip(times["off"], mine, strict=True)), 4
            ),
            "same_replies": sum(a == b for a, b in zip(sampled["off"], sampled[name], strict=True)),
        }
        for name, mine in times.items()
    }


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


def report(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The JSON."""
    return {
        "name": "capture_gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "benchmarks.capture_gpu", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        **more,
        "rows": rows,
    }


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/h200/capture_gpu.json"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 2,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a reply.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 48,
    commit: Annotated[str, typer.Option(help="What is measured; default: ask git.")] = "",
) -> None:
    """Measures decode throughput with capture off, on, and on with fc2; writes JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        model = Path(folder) / "model"
        model.mkdir()
        config = {**CONFIG, "num_hidden_layers": layers}
        (model / "config.json").write_text(json.dumps(config))
        bridges: dict[str, str] = {}
        servers: dict[str, Server] = {}
        for number, (name, flags) in enumerate(SETTINGS.items()):
            flags = [*FLAGS, *flags]
            if name != "off":
                bridge = embedded.start(memory_limit="32GiB")
                ending.callback(bridge.stop)
                bridges[name] = bridge.endpoint
                flags += ["--trace-bridge", bridge.endpoint]
            servers[name] = Server(model, Path(folder) / f"{number}.log", flags)
            ending.callback(servers[name].stop)
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.start, servers.values()))
        print("servers ready", flush=True)
        whole: Whole = {}
        more: dict[str, Any] = {"commit": commit or git_commit(), "layers": layers}
        for size in BATCHES:
            whole |= whole_batches(servers, size, rounds, tokens)
            rows = rows_of({name: server.log.read_text() for name, server in servers.items()})
            rows = [row | whole[row["batch"], row["capture"]] for row in rows]
            for row in rows[-len(SETTINGS) :]:
                print(json.dumps(row), flush=True)
            more["held"] = {name: missing(endpoint) for name, endpoint in bridges.items()}
            # After every batch, so that a run that is cut short has what it measured.
            out.write_text(json.dumps(report(rows, **more), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
