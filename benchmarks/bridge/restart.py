"""How long a daemon takes until it serves a store of many entries again, and the memory it takes.

The store is as an engine leaves it: nine messages of rows, then the trajectory that they belong to.
It is opened by a daemon of its own process with the checkpoint of its index, with the oldest one
that a crash can leave (as many entries are replayed as may be told between two checkpoints), and
without any, which replays the journal. Time is from the start of the process to `bridge ready`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.bridge.peers import cpu_seconds, resident_bytes
from benchmarks.command_line import command_line
from bridge.daemon.checkpoints import max_behind
from bridge.index import Catalog
from bridge.index.checkpoint import Checkpoint
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.store import DiskStore, Entry, Position
from bridge.store.journal import pack
from bridge.wire import Hello, Rows, Trajectory, TrajectoryState

_ROWS = 8  # of a message
_MESSAGES = 9  # of a trajectory, which is the tenth entry
_BATCH = 256
_LIMIT = 1 << 36
_LAYOUT = RecordLayout(ModelShape(1, 64, 32, 8, 2, 1, 16, (0,), (0,)), (0,), (Site.FC1,))
_PAYLOAD = np.zeros((_ROWS, _LAYOUT.row_bytes(Part.FORWARD)), dtype=np.uint8)


@dataclass(frozen=True)
class Start:
    """A start: what it found, and what it took until `bridge ready`.

    ``seconds`` is time that passed and ``cpu_seconds`` time that the daemon computed: they differ
    on a machine that has other work. ``rss`` is the memory that it then has.
    """

    checkpoint: str
    entries: int
    replayed: int
    seconds: float
    cpu_seconds: float
    rss: dict[str, int]
    checkpoint_bytes: int


def main(
    entries: Annotated[int, typer.Option(help="Entries of the store.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Starts of each kind; the median counts.")] = 3,
    made: Annotated[Path | None, typer.Option(help="What an earlier run with --keep made.")] = None,
    keep: Annotated[bool, typer.Option(help="Keep the store for another run.")] = False,
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = Path(
        "benchmarks/results/cpu/bridge_restart.json"
    ),
) -> None:
    """Measure the starts and write them down."""
    directory = made or Path(tempfile.mkdtemp())
    try:
        if made is None:
            print(f"making a store of {entries} entries in {directory}", flush=True)
            _make(directory / "store", entries)
            (directory / "store" / "index").rename(directory / "whole")
            (directory / "store" / "index.old").rename(directory / "oldest")
        behind = max_behind(entries)
        kinds = {"whole": 0, "oldest": min(behind, entries), "missing": entries}
        starts = []
        for kind, replayed in kinds.items():
            found = [_start(directory, kind, entries, replayed) for _ in range(rounds)]
            starts.append(sorted(found, key=lambda start: start.seconds)[rounds // 2])
            print(starts[-1], flush=True)
    finally:
        if not keep:
            shutil.rmtree(directory)
    document = {
        "what": " ".join((__doc__ or "").split()),
        "command": command_line("benchmarks.bridge.restart"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "python": platform.python_version(),
        },
        "starts": [asdict(start) for start in starts],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=2) + "\n")


def _make(directory: Path, entries: int) -> None:
    """Make a store, its checkpoint ``index``, and ``index.old``, the oldest that it may have."""
    store, catalog = DiskStore(directory, _LIMIT, sync=False), Catalog()
    oldest = max(0, entries - max_behind(entries))
    for begin in range(0, entries, _BATCH):
        numbers = range(begin, min(begin + _BATCH, entries))
        messages = [_message(number) for number in numbers]
        store.append([_entry(*item) for item in zip(messages, numbers, strict=True)])
        for message, number in zip(messages, numbers, strict=True):
            if number == oldest:
                _write(store, catalog, number)
                (directory / "index").rename(directory / "index.old")
            told = message.header if isinstance(message, Rows) else message
            catalog.apply(told, number, number)
    _write(store, catalog, entries)
    store.close()


def _message(number: int) -> Hello | Rows | Trajectory:
    if number == 0:
        return Hello("e", _LAYOUT)
    group, place = divmod(number - 1, _MESSAGES + 1)
    first = group * _MESSAGES * _ROWS
    if place < _MESSAGES:
        rows = np.arange(first + place * _ROWS, first + (place + 1) * _ROWS)
        return Rows.of("e", Part.FORWARD, rows, _PAYLOAD, "v")
    rows = np.arange(first, first + _MESSAGES * _ROWS)
    finished = TrajectoryState.FINISHED
    return Trajectory("e", f"t{group}", 0, rows.astype(np.int32), rows, finished)


def _entry(message: Hello | Rows | Trajectory, seq: int) -> Entry:
    if isinstance(message, Rows):
        return Entry(pack(message.header, seq), _PAYLOAD.reshape(-1).data, _PAYLOAD.shape[1])
    return Entry(pack(message, seq))


def _write(store: DiskStore, catalog: Catalog, end: int) -> None:
    begun = time.perf_counter()
    taken = Checkpoint.of(catalog, Position(end, 0))
    print(f"a checkpoint at {end} stops the daemon for {time.perf_counter() - begun:.2f} s")
    assert store.write_checkpoint(taken.chunks())


def _start(directory: Path, kind: str, entries: int, replayed: int) -> Start:
    """Start a daemon and kill it, so that it writes no checkpoint at its end."""
    index = directory / "store" / "index"
    index.unlink(missing_ok=True)
    if kind != "missing":
        shutil.copy(directory / kind, index)
    nbytes = index.stat().st_size if index.exists() else 0
    command = [sys.executable, "-m", "bridge", "serve", "--endpoint", "tcp://127.0.0.1:0"]
    command += ["--dir", str(directory / "store"), "--disk-limit", str(_LIMIT)]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith("bridge ready")
        seconds = time.perf_counter() - begun
        computed, rss = cpu_seconds(daemon.pid), resident_bytes(daemon.pid)
        daemon.kill()
    return Start(kind, entries, replayed, round(seconds, 2), round(computed, 2), rss, nbytes)


if __name__ == "__main__":
    typer.run(main)
