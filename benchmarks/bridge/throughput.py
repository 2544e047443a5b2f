"""What the bridge costs over the bare transports it is made of, and whether that stays flat.

Every ratio is measured in one run, bridge and peer taking turns at the same bytes, so that both see
the same machine; the median of the rounds counts. The bridge runs as an engine finds it: its own
process, acknowledgements and checksums on. Its peer in a fetch is a PUSH socket of plain pyzmq that
holds the very frames of the bridge's answers in memory and sends each of them once a round, and a
PULL socket that throws them away; the bridge's client also checks them and joins them to tensors.
Bridge and clients are on one machine, so rows go through memory that the clients lend; `socket` has
what they take without, as between machines.

Cost a row is CPU time of the daemon, in windows of equal work: a daemon that holds more and more
rows takes turns with new ones that hold about 10^4, so that what the machine does to one it does to
both.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.bridge.peers import (
    BarePipe,
    cpu_seconds,
    replies,
    resident_bytes,
    write_and_sync,
)
from benchmarks.command_line import command_line
from bridge.cli.size_table import PUBLISHED
from bridge.client import connection
from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.layout import ModelShape, Part, RecordLayout, Site, deeper_half
from bridge.producer import producer
from bridge.producer.producer import RecordProducer
from bridge.wire import Rows, encode

MOST_ROWS = 256  # of one message: a forward pass of a full decode batch, if 4 MiB hold it
MIB = 1 << 20
_LENGTH = 100  # tokens of a trajectory whose cost a row is measured
_TOGETHER = 32  # trajectories that are decoded together
_WINDOW = _LENGTH * _TOGETHER  # rows
_WINDOWS = 5
_FRESH = 3  # new daemons, each measured in so many windows

SMALL = ModelShape(1, 256, 128, 8, 4, 1, 16, (0,), (0,))
LAYOUTS = {
    "Qwen3.5-35B-A3B, default": RecordLayout(
        PUBLISHED["Qwen3.5-35B-A3B"], deeper_half(40), (Site.FC1, Site.K, Site.V, Site.ROUTES)
    ),
    "Qwen3-30B-A3B, with fc2": RecordLayout(
        PUBLISHED["Qwen3-30B-A3B"], deeper_half(48), tuple(Site)
    ),
}


@dataclass(frozen=True)
class Load:
    """Messages of one forward pass each, again and again: layout, record bytes, how many bytes."""

    name: str
    layout: RecordLayout
    payload: NDArray[np.uint8]
    round_bytes: int

    @property
    def batch(self) -> int:
        """Rows of a message."""
        return len(self.payload)

    @property
    def messages(self) -> int:
        return max(1, self.round_bytes // self.payload.nbytes)

    @property
    def rows(self) -> int:
        return self.messages * self.batch


def loads(round_bytes: int, most_rows: int = MOST_ROWS) -> list[Load]:
    rng = np.random.default_rng(0)
    return [
        Load(
            name,
            layout,
            rng.integers(0, 256, (min(most_rows, 4 * MIB // width), width), dtype=np.uint8),
            round_bytes,
        )
        for name, layout in LAYOUTS.items()
        for width in [layout.row_bytes(Part.FORWARD)]
    ]


@contextmanager
def served(load: Load, **options: Any) -> Iterator[tuple[int, RecordProducer, TraceClient]]:
    """A bridge of its own: (process id, an engine that said hello, a trainer)."""
    bridge = spawn.start(**options)
    try:
        with RecordProducer(bridge.endpoint) as engine, TraceClient(bridge.endpoint) as trainer:
            engine.register("engine", load.layout)
            yield bridge.process.pid, engine, trainer
    finally:
        bridge.stop()


def send(engine: RecordProducer, load: Load, turn: int) -> None:
    """Send all rows of a turn and wait until they are acknowledged."""
    first = turn * load.rows
    for begin in range(first, first + load.rows, load.batch):
        rows = np.arange(begin, begin + load.batch)
        engine.send_rows(Part.FORWARD, rows, load.payload, str(turn), copy=False)
    engine.flush()


@dataclass
class Sides:
    """Wall seconds of every round, and CPU seconds of both processes together."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @contextmanager
    def measured(self, other: int | None) -> Iterator[None]:
        """Measure a round in which this process and ``other`` work."""
        pids = [os.getpid(), *([] if other is None else [other])]
        before, started = sum(map(cpu_seconds, pids)), time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - started)
        self.cpu.append(sum(map(cpu_seconds, pids)) - before)

    def after(self, warm: int) -> Sides:
        """Leave out the first rounds."""
        return Sides(self.seconds[warm:], self.cpu[warm:])


def ratios(name: str, load: Load, ours: Sides, peer: Sides, **more: Any) -> dict[str, Any]:
    """Speed and CPU cost of both sides, and the peer's seconds over ours round by round."""
    nbytes = load.messages * load.payload.nbytes
    return {
        "measure": name,
        "shape": load.name,
        "row_bytes": load.payload.shape[1],
        "mb_per_s": nbytes / statistics.median(ours.seconds) / 1e6,
        "peer_mb_per_s": nbytes / statistics.median(peer.seconds) / 1e6,
        "ratio": statistics.median(b / a for a, b in zip(ours.seconds, peer.seconds, strict=True)),
        "cpu_s_per_gb": statistics.mean(ours.cpu) / nbytes * 1e9,
        "peer_cpu_s_per_gb": statistics.mean(peer.cpu) / nbytes * 1e9,
        **more,
    }


def ingest_memory(load: Load, rounds: int) -> dict[str, Any]:
    """Ingest into memory that earlier steps have used, against PUSH and PULL of the same frames."""
    message = Rows.of("engine", Part.FORWARD, np.arange(load.batch), load.payload, "0")
    pipe, frames = BarePipe(), encode(message, 0)
    ours, peer = Sides(), Sides()
    with served(load, keep=1, memory_limit="4GiB") as (pid, engine, trainer):
        for turn in range(rounds + 2):
            trainer.begin_step(turn)
            with ours.measured(pid):
                send(engine, load, turn)
            with peer.measured(pipe.pid):
                pipe.push(frames, load.messages)
    pipe.close()
    first_fill = peer.seconds[0] / ours.seconds[0]
    return ratios("ingest to memory", load, ours.after(2), peer.after(2), first_fill=first_fill)


def ingest_disk(load: Load, rounds: int, folder: Path) -> dict[str, Any]:
    """Ingest to disk, against writing the same bytes to a file with as many fsyncs."""
    ours, peer, cadence = Sides(), Sides(), 0
    directory = folder / str(load.payload.shape[1])
    with served(load, directory=directory, keep=1, memory_limit="256MiB") as (pid, engine, trainer):
        for turn in range(rounds + 1):
            trainer.begin_step(turn)
            before = trainer.stats().commits
            with ours.measured(pid):
                send(engine, load, turn)
            cadence = trainer.stats().commits - before
            with peer.measured(None):
                write_and_sync(folder / "plain", load.payload.data, load.messages, cadence)
            (folder / "plain").unlink()
    per_sync = load.messages * load.payload.nbytes / cadence / MIB
    return ratios("ingest to disk", load, ours.after(1), peer.after(1), mib_per_sync=per_sync)


def fetch_memory(load: Load, rounds: int) -> Iterator[dict[str, Any]]:
    """Fetch from memory, against PUSH and PULL of the same frames.

    A decoded trajectory has one row in every message, a prompt has whole messages.
    """
    rows_of = {
        "decoded": np.arange(load.messages) * load.batch,
        "prompt": np.arange(load.messages),
    }
    with served(load, memory_limit="4GiB") as (pid, engine, trainer):
        send(engine, load, 0)
        for kind, rows in rows_of.items():
            names = [f"{kind}{number}" for number in range(load.batch)]
            for number, name in enumerate(names):
                own = rows + number * (1 if kind == "decoded" else load.messages)
                engine.send_trajectory(name, 0, range(load.messages), own, "finished")
            engine.flush()
            pipe = BarePipe(partial(replies, trainer.endpoint, names))
            ours, peer = Sides(), Sides()
            for _ in range(rounds + 1):
                with ours.measured(pid):
                    for _ in trainer.fetch_all(names):
                        pass
                with peer.measured(pipe.pid):
                    pipe.pull()
            pipe.close()
            yield ratios(f"fetch {kind}", load, ours.after(1), peer.after(1))


def through_socket(
    shapes: list[Load], fetched: list[Load], rounds: int
) -> Iterator[dict[str, Any]]:
    """Ingest and fetch from memory again, with no memory lent."""
    with (
        patch.multiple(connection, is_loopback=_never),
        patch.multiple(producer, is_loopback=_never),
    ):
        for row in chain(
            (ingest_memory(load, rounds) for load in shapes),
            chain.from_iterable(fetch_memory(load, rounds) for load in fetched),
        ):
            yield row | {"measure": f"{row['measure']}, socket"}


def _never(_endpoint: str) -> bool:
    return False


def flat_cost(most: int) -> Iterator[dict[str, Any]]:
    """CPU of the daemon per row while it holds more and more rows, over that of new daemons.

    The first result compares new daemons with each other: what differs from 1 there is noise.
    """
    yield _compared(None)
    with cost_side() as grown:
        for target in [10**power for power in range(5, 8) if 10**power <= most]:
            grown.growth.to(target - _FRESH * (_WINDOWS + 1) * _WINDOW)
            yield _compared(grown)


def _compared(grown: CostSide | None) -> dict[str, Any]:
    """Measure in turns with some new daemons, after a window that does not count."""
    ingest: list[tuple[float, float]] = []
    fetch: list[tuple[float, float]] = []
    scattered: list[tuple[float, float]] = []
    for _ in range(_FRESH):
        with cost_side() as few, nullcontext(grown) if grown else cost_side() as side:
            turns = range(_WINDOWS + 1)
            ingest += [(side.ingest(), few.ingest()) for _ in turns][1:]
            fetch += [(side.fetch(), few.fetch()) for _ in turns][1:]
            scattered += [(side.fetch(scattered=True), few.fetch(scattered=True)) for _ in turns]
            held, index_bytes = side.growth.held, side.trainer.stats().index_bytes
    return {
        "measure": "cost per row",
        "rows_held": held,
        "ingest_us_per_row": statistics.median(own for own, _ in ingest) * 1e6,
        "fetch_us_per_row": statistics.median(own for own, _ in fetch) * 1e6,
        "ingest_over_few": statistics.median(own / new for own, new in ingest),
        "fetch_over_few": statistics.median(own / new for own, new in fetch),
        "scattered_fetch_over_few": statistics.median(own / new for own, new in scattered),
        "index_bytes_per_row": index_bytes / held,
    }


@contextmanager
def cost_side() -> Iterator[CostSide]:
    """A bridge whose cost a row is measured, from a window's rows on."""
    layout = RecordLayout(SMALL, (0,), (Site.FC1,))
    payload = np.zeros((_TOGETHER, layout.row_bytes(Part.FORWARD)), dtype=np.uint8)
    with served(Load("", layout, payload, 0), memory_limit="6GiB") as (pid, engine, trainer):
        side = CostSide(pid, trainer, Growth(engine, payload, _LENGTH))
        side.growth.to(_WINDOW)
        yield side


@dataclass
class CostSide:
    """A daemon and what it holds; every call is a window of equal work: CPU seconds a row."""

    pid: int
    trainer: TraceClient
    growth: Growth
    rng: np.random.Generator = field(default_factory=partial(np.random.default_rng, 0))

    def ingest(self) -> float:
        before = cpu_seconds(self.pid)
        self.growth.to(self.growth.held + _WINDOW)
        return (cpu_seconds(self.pid) - before) / _WINDOW

    def fetch(self, scattered: bool = False) -> float:
        """Read as many rows: trajectories that were decoded together, or one here and one there."""
        names = self.growth.names
        if scattered:
            numbers = self.rng.choice(len(names), _TOGETHER, replace=False).tolist()
        else:
            first = _TOGETHER * int(self.rng.integers(len(names) // _TOGETHER))
            numbers = list(range(first, first + _TOGETHER))
        before = cpu_seconds(self.pid)
        for _ in self.trainer.fetch_all([names[number] for number in numbers]):
            pass
        return (cpu_seconds(self.pid) - before) / _WINDOW


class Growth:
    """Rows of trajectories of ``length`` tokens, each row of a message of another trajectory."""

    def __init__(self, engine: RecordProducer, payload: NDArray[np.uint8], length: int) -> None:
        self._engine = engine
        self._payload = payload
        self._length = length
        self.held = 0
        self.names: list[str] = []

    def to(self, target: int) -> None:
        """Send rows until so many are held and acknowledged."""
        batch = len(self._payload)
        while self.held < target:
            rows = np.arange(self.held, self.held + batch)
            self._engine.send_rows(Part.FORWARD, rows, self._payload, "v", copy=False)
            self.held += batch
            if self.held % (batch * self._length) == 0:
                self._finish(self.held - batch * self._length)
        self._engine.flush()

    def _finish(self, first: int) -> None:
        batch = len(self._payload)
        for number in range(batch):
            own = first + number + np.arange(self._length) * batch
            self.names.append(f"{first}.{number}")
            self._engine.send_trajectory(self.names[-1], 0, range(self._length), own, "finished")


def resident(load: Load, folder: Path, limit_mib: int) -> dict[str, Any]:
    """Memory of the daemon that takes four times its memory limit, with a disk below."""
    most = {"RssAnon": 0, "RssFile": 0}
    limit = f"{limit_mib}MiB"
    with served(load, memory_limit=limit, spill=folder) as (pid, engine, trainer):
        for turn in range(max(1, 4 * limit_mib * MIB // load.round_bytes)):
            send(engine, load, turn)
            most = {name: max(most[name], now) for name, now in resident_bytes(pid).items()}
        names = [f"t{number}" for number in range(8)]
        for number, name in enumerate(names):
            rows = np.arange(load.messages) * load.batch + number
            engine.send_trajectory(name, 0, range(load.messages), rows, "finished")
        engine.flush()
        for name in names:
            trainer.fetch(name)
            most = {key: max(most[key], now) for key, now in resident_bytes(pid).items()}
    return {
        "measure": "resident memory",
        "shape": load.name,
        "limit_bytes": limit_mib * MIB,
        "own_bytes": most["RssAnon"],
        "file_bytes": most["RssFile"],
        "own_over_limit": most["RssAnon"] / (limit_mib * MIB),
    }


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": "bridge_throughput",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": command_line("benchmarks.bridge.throughput"),
        "device": f"{platform.machine()} CPU",
        "versions": {name: version(name) for name in ("pyzmq", "lmdb", "numpy", "xxhash")},
        "rows": rows,
    }


@lru_cache(maxsize=1)
def _commit() -> str:
    if shutil.which("git") is None:
        return ""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/cpu/bridge_throughput.json"
    ),
    folder: Annotated[
        Path | None, typer.Option(help="Disk to measure on; default: that of temporary files.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    round_mib: Annotated[int, typer.Option(min=64, help="MiB moved in a round.")] = 512,
    most_rows: Annotated[int, typer.Option(help="Rows held at the end of cost per row.")] = 10**7,
    only: Annotated[str, typer.Option(help="Measure only this: memory, disk, fetch, ...")] = "",
    socket: Annotated[
        bool, typer.Option("--socket", help="No lent memory, as over a net.")
    ] = False,
) -> None:
    """Measures ingest, fetch, cost per row and memory of the bridge; writes JSON as it goes."""
    shapes = loads(round_mib * MIB)
    fetched = loads(2 * round_mib * MIB, 64)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        measures: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "memory": lambda: (ingest_memory(load, rounds) for load in shapes),
            "disk": lambda: (ingest_disk(load, rounds, work) for load in shapes),
            "fetch": lambda: chain.from_iterable(fetch_memory(load, rounds) for load in fetched),
            "socket": lambda: through_socket(shapes, fetched, rounds),
            "flat": lambda: flat_cost(most_rows),
            "resident": lambda: [resident(shapes[0], work, 1024)],
        }
        rows: list[dict[str, Any]] = []
        out.parent.mkdir(parents=True, exist_ok=True)
        for key, measure in measures.items():
            for row in measure() if only in ("", key) else ():
                rows.append(row)
                print(json.dumps(row), flush=True)
                out.write_text(json.dumps(result(rows), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
