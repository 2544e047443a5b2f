"""What capture costs decode on a GPU: the same FP4 server with and without it, on one card.

Qwen3-30B-A3B's shape, 48 layers, dummy weights. All servers run at once and take turns at the same
batch, so that all see the same machine; an idle one uses neither the GPU nor a core. A batch is
groups of samples of the same 4,096-token prompts, as in GRPO. Decode time is that of a long reply
less that of a short one, so that prefill, HTTP and the end of a request drop out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

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
BATCHES = (1, 8, 32, 128)
CONTEXT = 4096
PROMPTS = 8
FLAGS = [
    *("--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend", "triton"),
    *("--max-total-tokens", "120000", "--max-running-requests", "128"),
    *("--chunked-prefill-size", "8192", "--disable-prefill-cuda-graph", "--sleep-on-idle"),
    *("--cuda-graph-bs-decode", *map(str, BATCHES)),
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


def measure(servers: dict[str, Server], rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Fill one row a batch and setting; prints them as they come."""
    rows = []
    for size in BATCHES:
        batch = Batch(size)
        times: dict[str, list[float]] = {name: [] for name in servers}
        sampled: dict[str, list[list[int]]] = {}
        for server in servers.values():
            batch.seconds(server, 8)
        for _ in range(rounds):
            for name, server in servers.items():
                short, _ = batch.seconds(server, 8)
                long, sampled[name] = batch.seconds(server, 8 + tokens)
                times[name].append((long - short) / tokens)
        for name, mine in times.items():
            ratio = statistics.median(off / on for off, on in zip(times["off"], mine, strict=True))
            rows.append(
                {
                    "batch": size,
                    "context": CONTEXT,
                    "capture": name,
                    "ms_per_step": round(statistics.median(mine) * 1000, 4),
                    "tokens_per_s": round(size / statistics.median(mine), 1),
                    "throughput_ratio": round(ratio, 4),
                    "rounds_ms": [round(each * 1000, 4) for each in mine],
                    "same_tokens": sum(
                        a == b for a, b in zip(sampled["off"], sampled[name], strict=True)
                    ),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def missing(bridge: str) -> dict[str, int]:
    """What a capturing server's bridge holds and lacks."""
    time.sleep(2)
    with TraceClient(bridge) as client:
        told = list(client.list_trajectories())
        return {
            "trajectories": len(told),
            "rows": sum(each.rows for each in told),
            "rows_missing": sum(each.missing_forward for each in told),
            "stored_rows": client.stats().forward_rows,
            "stored_bytes": client.stats().used_bytes,
        }


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/h200/capture_gpu.json"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 3,
    tokens: Annotated[int, typer.Option(min=8, help="Decode steps that are timed.")] = 512,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 48,
    commit: Annotated[str, typer.Option(help="What is measured; default: ask git.")] = "",
) -> None:
    """Measures decode throughput with capture off, on, and on with fc2; writes JSON."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        config = {**CONFIG, "num_hidden_layers": layers}
        (model / "config.json").write_text(json.dumps(config))
        bridges = {name: embedded.start(memory_limit="32GiB") for name in SETTINGS if name != "off"}
        servers = {
            name: Server(model, Path(folder) / f"{number}.log", [*FLAGS, *flags])
            for number, (name, flags) in enumerate(SETTINGS.items())
        }
        for name, bridge in bridges.items():
            servers[name].flags += ["--trace-bridge", bridge.endpoint]
        try:
            started = time.perf_counter()
            with ThreadPoolExecutor() as threads:
                list(threads.map(Server.start, servers.values()))
            print(f"servers ready after {time.perf_counter() - started:.0f} s", flush=True)
            rows = measure(servers, rounds, tokens)
            held = {name: missing(bridge.endpoint) for name, bridge in bridges.items()}
            print(json.dumps(held), flush=True)
        finally:
            for name, server in servers.items():
                print(name, server.log_tail(4), sep="\n", flush=True)
                server.stop()
            for bridge in bridges.values():
                bridge.stop()
    report = {
        "name": "capture_gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "command": f"python -m benchmarks.capture_gpu --rounds {rounds} --tokens {tokens}",
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        "layers": layers,
        "held": held,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
