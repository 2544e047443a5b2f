"""What it costs to join rows that several ranks of an engine sent, over rows of one rank.

The same rows are held three times by one bridge: sent whole by one rank, and divided among
tensor-parallel and expert-parallel ranks. Fetches take turns; the median of the rounds counts.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.bridge.throughput import LAYOUTS
from benchmarks.command_line import command_line
from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.layout import Part, RecordLayout, TensorSlice
from bridge.layout.columns import byte_columns
from bridge.layout.rank_shards import rank_shards
from bridge.layout.tensor_slice import ALL_VALUES
from bridge.producer.producer import RecordProducer

LOAD = "Qwen3-30B-A3B, with fc2"
SPLITS = {"1 rank": (1, 1), "TP 4": (4, 1), "TP 4, EP 4": (4, 4), "TP 4, EP 2": (4, 2)}
FETCHES = {
    "everything": ALL_VALUES,
    "a quarter of fc2's width and a head": TensorSlice((0, 192), (0, 1)),
}
MESSAGE_ROWS = 64


def send(
    endpoint: str, name: str, layout: RecordLayout, rows: dict[Part, NDArray[np.uint8]]
) -> int:
    """Send rows as the ranks of a split do; return the bytes that travelled."""
    tp, ep = SPLITS[name]
    shards, count, nbytes = rank_shards(layout, tp, ep), len(rows[Part.KV]), 0
    for rank, shard in enumerate(shards):
        with RecordProducer(endpoint) as producer:
            producer.register(name, layout, shards=shards, shard=rank)
            for part in Part:
                sent = rows[part][:, byte_columns(layout, shard.layout, part)]
                if shard.by_slot and part is Part.FORWARD:
                    owners = np.random.default_rng(5).integers(0, ep, (count, shard.slots))
                    sent = shard.pack(sent, owners == rank // (tp // ep))
                nbytes += sent.nbytes
                for first in range(0, count if sent.size else 0, MESSAGE_ROWS):
                    piece = slice(first, first + MESSAGE_ROWS)
                    producer.send_rows(part, np.arange(count)[piece], sent[piece], "v")
            if rank == 0:
                producer.send_trajectory(name, 0, range(count), range(count), "finished")
    return nbytes


def measure(count: int, rounds: int) -> list[dict[str, Any]]:
    layout, draw = LAYOUTS[LOAD], np.random.default_rng(0)
    rows = {
        part: draw.integers(0, 256, (count, layout.row_bytes(part)), dtype=np.uint8)
        for part in Part
    }
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    bridge = spawn.start(memory_limit="4GiB")
    try:
        sent = {name: send(bridge.endpoint, name, layout, rows) for name in SPLITS}
        with TraceClient(bridge.endpoint) as client:
            for _ in range(rounds):
                for name in SPLITS:
                    for what, kept in FETCHES.items():
                        begin = time.perf_counter()
                        records = client.fetch(name, tensor_slice=kept)
                        times[name, what].append(time.perf_counter() - begin)
                        assert records.forward_valid.all(), (name, what)
    finally:
        bridge.stop()
    return [
        {
            "load": LOAD,
            "split": name,
            "fetch": what,
            "sent_over_one_rank": sent[name] / sent["1 rank"],
            "MB_per_s": _bytes(layout, what) * count / statistics.median(taken) / 1e6,
            "ratio_to_one_rank": statistics.median(
                one / ours for one, ours in zip(times["1 rank", what], taken, strict=True)
            ),
        }
        for (name, what), taken in times.items()
    ]


def _bytes(layout: RecordLayout, what: str) -> int:
    return layout.narrow(tensor_slice=FETCHES[what]).bytes_per_token()


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/cpu/bridge_ranks.json"
    ),
    tokens: Annotated[int, typer.Option(help="Length of the trajectory.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 15,
) -> None:
    """Measures fetches of rows that 1 and 4 ranks sent; writes JSON."""
    rows = measure(tokens, rounds)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "name": "bridge_ranks",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command_line("benchmarks.bridge.ranks"),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "versions": {package: version(package) for package in ("pyzmq", "numpy", "xxhash")},
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    typer.run(main)
