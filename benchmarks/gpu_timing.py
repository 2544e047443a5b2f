"""Time GPU work and write it down beside the least that its bytes could take."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
import triton

from benchmarks.command_line import command_line

Call = Callable[[int], object]
# Of calls without a graph: the first launch after a wait does not count for much then.
LEAST_ROUND_US = 20_000


def microseconds(call: Call, sets: int, replays: int = 15) -> float:
    """Median time of `call(set)`, the sets in turn inside one CUDA graph."""
    for index in range(sets):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            call(index)
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / sets)
    return statistics.median(times[2:])


def eager_microseconds(call: Callable[[], object], rounds: int = 7) -> float:
    """Median time of a call without a graph: many after each other between two events.

    Where the host needs longer for a launch than the device for the work, that is the time.
    """

    def elapsed(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / calls

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    calls = max(1, min(100, int(LEAST_ROUND_US / elapsed(3))))
    return statistics.median(elapsed(calls) for _ in range(rounds))


class Table:
    """Rows of the JSON, printed as they come."""

    def __init__(self, gigabytes_per_s: float) -> None:
        self.rate = gigabytes_per_s
        self.rows: list[dict[str, Any]] = []

    def add(self, kernel: str, batch: int, nbytes: int, us: float, **more: Any) -> None:
        """Note a time beside the time that its bytes take at the copy's rate."""
        limit = nbytes / self.rate / 1000
        row = {
            "kernel": kernel,
            "batch": batch,
            "us": round(us, 2),
            "bytes": nbytes,
            "limit_us": round(limit, 3),
            "of_limit": round(limit / us, 3),
            **more,
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def note(self, kernel: str, batch: int, **more: Any) -> None:
        """A row without a time, such as that of a kernel that failed."""
        row = {"kernel": kernel, "batch": batch, **more}
        self.rows.append(row)
        print(json.dumps(row), flush=True)


def copy_rate() -> float:
    """GB/s of an elementwise kernel, bytes read and written."""
    # A kernel: what the copy engine moves inside a graph is less.
    source = torch.randint(0, 1 << 60, (1 << 27,), device="cuda")
    target = torch.empty_like(source)
    us = microseconds(lambda _: torch.bitwise_not(source, out=target), 1)
    return 2 * source.nbytes / us / 1000


def git_commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def result(name: str, table: Table, commit: str, **more: Any) -> dict[str, Any]:
    """The JSON."""
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command_line(f"benchmarks.{name}"),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "copy_gb_per_s": round(table.rate),
        **more,
        "rows": table.rows,
    }
