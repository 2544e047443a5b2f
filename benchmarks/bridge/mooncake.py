"""What the bridge's Mooncake tier costs over Mooncake's own client, on the same values.

Tier and client take turns in one process at a pool of this machine, over TCP; the median of the
rounds counts. The client is used both ways that it offers: bytes (put, get), and batches from and
into registered buffers; the faster one is the peer. The tier also checksums every row and syncs its
journal to disk, so a put is compared a second time with a client that writes and syncs as many
bytes to a plain file (``ratio_synced``).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.bridge.throughput import Load, loads
from benchmarks.command_line import command_line
from bridge.cli.mooncake_pool import POOL_READY
from bridge.store import Entry, MooncakeStore, Wanted

BATCH = 16  # messages stored together: as many as wait for the daemon from one engine
BATCHES = 4  # a round
N = BATCH * BATCHES
POOL_MIB = 640  # little more than is in use: all of it is touched before the first measured round


class Client:
    """Mooncake's own client with registered buffers: uint8 [N, bytes of a value]."""

    def __init__(self, master: str, values: NDArray[np.uint8], rows: int) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self.mooncake = MooncakeDistributedStore()
        nbytes = values.shape[1]
        code = self.mooncake.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
        assert code == 0, code
        self.rows = rows
        self.values, self.read = values, np.empty_like(values)
        self.bytes = [value.tobytes() for value in values]
        self.keys = [f"client/{number}" for number in range(N)]
        self.sizes = [nbytes] * BATCH
        self.pinned = ReplicateConfig()
        self.pinned.with_hard_pin = True
        for buffer in (self.values, self.read):
            assert self.mooncake.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0

    def put_bytes(self) -> None:
        for key, value in zip(self.keys, self.bytes, strict=True):
            assert self.mooncake.put(key, value, self.pinned) == 0

    def get_bytes(self) -> None:
        for key in self.keys:
            assert self.mooncake.get(key)

    def put_batches(self, journal: int | None = None) -> None:
        """Put all values; write and sync a journal of checksums after every batch if asked to."""
        for keys, pointers in self._batches(self.values):
            assert not any(self.mooncake.batch_put_from(keys, pointers, self.sizes, self.pinned))
            if journal is not None:
                os.write(journal, bytes(8 * self.rows * BATCH))
                os.fsync(journal)

    def get_batches(self) -> None:
        for keys, pointers in self._batches(self.read):
            assert self.mooncake.batch_get_into(keys, pointers, self.sizes) == self.sizes

    def get_rows(self, row: int, row_bytes: int) -> None:
        """Read one row of every value."""
        places = [[number * row_bytes] for number in range(N)]
        sources, sizes = [[row * row_bytes]] * N, [[row_bytes]] * N
        pointers = [self.read.ctypes.data]
        done = self.mooncake.get_into_ranges(pointers, [self.keys], [places], [sources], [sizes])
        assert done == [sizes]

    def remove(self) -> None:
        assert not any(self.mooncake.batch_remove(self.keys, True))

    def _batches(self, buffer: NDArray[np.uint8]) -> Iterator[tuple[list[str], list[int]]]:
        base, step = buffer.ctypes.data, buffer.shape[1]
        for begin in range(0, N, BATCH):
            numbers = range(begin, begin + BATCH)
            yield self.keys[begin : begin + BATCH], [base + number * step for number in numbers]


class Tier:
    """The same values as entries of a store."""

    def __init__(self, folder: Path, master: str, values: NDArray[np.uint8], row_bytes: int):
        self.store = MooncakeStore(folder, 1 << 30, master)
        self.row_bytes = row_bytes
        self.entries = [Entry(b"header" * 20, value.data, row_bytes) for value in values]
        self.numbers: list[int] = []

    def put(self) -> None:
        for begin in range(0, N, BATCH):
            self.numbers += self.store.append(self.entries[begin : begin + BATCH])

    def get(self) -> None:
        rows = self.entries[0].nbytes // self.row_bytes
        self._read([(number, 0, 0, rows) for number in self.numbers])

    def get_rows(self, row: int) -> None:
        self._read([(number, row, 0, 1) for number in self.numbers])

    def remove(self) -> None:
        self.store.delete(self.numbers)
        self.numbers = []

    def _read(self, runs: list[tuple[int, int, int, int]]) -> None:
        with self.store.reader(Wanted(self.row_bytes, runs)) as read:
            for number, _, _, count in runs:
                held = read(number)
                assert held is not None
                assert held.payload.nbytes == count * self.row_bytes


def measure(load: Load, folder: Path, master: str, rounds: int) -> list[dict[str, Any]]:
    rows, row_bytes = load.payload.shape
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (N, rows * row_bytes), dtype=np.uint8)
    client, tier = Client(master, values, rows), Tier(folder, master, values, row_bytes)
    plain = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT)
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        row = turn % rows
        turns: list[dict[str, Callable[[], None]]] = [
            {"client put bytes": client.put_bytes},
            {"client get bytes": client.get_bytes},
            {"removed": client.remove},
            {"synced": partial(client.put_batches, plain)},
            {"removed": client.remove},
            {"put": tier.put, "client put batches": client.put_batches},
            {"get": tier.get, "client get batches": client.get_batches},
            {
                "get rows": partial(tier.get_rows, row),
                "client get rows": partial(client.get_rows, row, row_bytes),
            },
            {"removed": client.remove},
            {"removed": tier.remove},
        ]
        for actions in turns:
            for key in sorted(actions, reverse=bool(turn % 2)):
                started = time.perf_counter()
                actions[key]()
                times[key].append(time.perf_counter() - started)
    os.close(plain)
    tier.store.close()
    client.mooncake.close()
    measured = {key: seconds[1:] for key, seconds in times.items()}
    moved = {"put": values.nbytes, "get": values.nbytes, "get rows": N * row_bytes}
    return [_row(key, load, nbytes, measured) for key, nbytes in moved.items()]


def _row(key: str, load: Load, nbytes: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Compare with the faster way of the client."""
    ours = times[key]
    peers = {peer: times[peer] for peer in times if peer.startswith(f"client {key}")}
    if key == "get":
        del peers["client get rows"]
    fastest = min(peers, key=lambda peer: statistics.median(peers[peer]))
    return {
        "measure": f"mooncake {key}",
        "shape": load.name,
        "value_bytes": load.payload.nbytes,
        "row_bytes": load.payload.shape[1],
        "mb_per_s": nbytes / statistics.median(ours) / 1e6,
        **{f"{p} mb_per_s": nbytes / statistics.median(t) / 1e6 for p, t in peers.items()},
        "peer": fastest,
        "ratio": _ratio(ours, peers[fastest]),
        **({"ratio_synced": _ratio(ours, times["synced"])} if key == "put" else {}),
    }


def _ratio(ours: list[float], peer: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(ours, peer, strict=True))


@contextmanager
def pool(port: int, mib: int) -> Iterator[str]:
    command = [sys.executable, "-m", "bridge", "mooncake", "--size", f"{mib}MiB"]
    command += ["--port", str(port), "--parent", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().removeprefix(POOL_READY).strip()
    finally:
        process.terminate()
        process.wait()


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/cpu/bridge_mooncake.json"
    ),
    folder: Annotated[
        Path | None, typer.Option(help="Disk of the journal; default: that of temporary files.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 15,
    port: Annotated[int, typer.Option(help="A free port for the pool's master.")] = 50151,
) -> None:
    """Measures put and get of the Mooncake tier against Mooncake's own client; writes JSON."""
    rows: list[dict[str, Any]] = []
    with pool(port, POOL_MIB) as master, tempfile.TemporaryDirectory(dir=folder) as work:
        for index, load in enumerate(loads(1)):
            rows += measure(load, Path(work) / str(index), master, rounds)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "name": "bridge_mooncake",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command_line("benchmarks.bridge.mooncake"),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": {
            package: version(package)
            for package in ("mooncake-transfer-engine-non-cuda", "lmdb", "numpy", "xxhash")
        },
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    typer.run(main)
