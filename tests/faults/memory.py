"""Memory of engine, daemon and trainer while the other side takes nothing, each against its limit.

Measured is a process's own memory (RssAnon) and what a trainer lends (RssShmem, in the trainer and
in the daemon that writes there) over what it had before the first record; the limits are those that
docs/architecture.md and the options state, and a little for the allocator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq

from bridge.client.client import TraceClient
from bridge.errors import BridgeUnreachable
from bridge.producer.producer import Overflow
from bridge.transport.shared_memory import BUFFER_BYTES, BUFFERS
from bridge.wire import Fetch, PageRows, decode, encode
from tests.faults import engine
from tests.faults.engine import Stream, fill
from tests.faults.expected import LAYOUT, Expected
from tests.faults.fault import Fault, Repetition, nothing
from tests.faults.killed import finish, some_of
from tests.faults.outcome import Memory, Outcome
from tests.faults.processes import (
    Bridge,
    Lanes,
    asking,
    lanes_in_memory,
    paused,
    running,
    wait_until,
)
from tests.faults.trainer import Reading
from tests.faults.verifier import verify

MIB = 1 << 20
_LOOK_S = 0.01
_ALLOCATOR = 8 * MIB
_REST_S = 0.5
_WINDOW = 8 * MIB
_ENGINE_ROWS = 16_000  # 31 MB
_MEMORY_LIMIT = 256 * MIB
_FLOOD_ROWS = 160_000  # 309 MB
_SMALL_LIMIT = 64 * MIB
_SMALL_FLOOD_ROWS = 40_000  # 77 MB
_PAGES = Expected("pages", 20_000)  # 39 MB: two pages in memory that is lent
_PAGES_BYTES = _PAGES.rows * (LAYOUT.bytes_per_token() + 32)
_CROWDED = Expected("crowded", 100_000)  # 193 MB
_CROWDED_FLOOD_ROWS = 10_000  # 19 MB
_SLOW, _SLOW_QUESTIONS = 60, 50
_CLIENTS, _ANSWERS = 500, 3
_ROUND_S = 0.5
_STALLED_TRAINERS = 3
# All that a client lends (docs/architecture.md).
_LENT = BUFFERS * BUFFER_BYTES
_COUNTED = ("RssAnon:", "RssShmem:")


class Watched:
    """The memory of a process, looked at often: what is no file's, or all that is resident."""

    def __init__(self, pid: int, counted: tuple[str, ...] = _COUNTED) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._counted = counted
        self.before = self.peak = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def memory(self, limit: int) -> Memory:
        """Return the peak over what there was before."""
        return Memory(self.peak - self.before, limit)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        try:
            lines = self._status.read_text().splitlines()
        except OSError:
            return 0  # it has ended
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(self._counted))


def engine_while_daemon_is_stopped(overflow: Overflow, repetition: Repetition) -> Outcome:
    """Its window and no more, whether it waits or drops; what it drops is counted."""
    with repetition.setting.bridge() as bridge:
        stream = repetition.stream(
            bridge.endpoint,
            rows=_ENGINE_ROWS,
            rest_s=_REST_S,
            pace_s=0.0,
            most_rows=256,
            window_bytes=_WINDOW,
            overflow=overflow,
        )
        with running(engine.run, stream, fresh=True) as process:
            _wait_for_hello(repetition, stream)
            assert process.pid is not None
            with Watched(process.pid) as watched:
                with paused(bridge.pid):
                    time.sleep(repetition.stop_s)
                outcome = finish(repetition, process, stream)
        outcome.memory = watched.memory(_WINDOW * 5 // 4 + _ALLOCATOR)
        with asking(bridge.endpoint, repetition.end) as client:
            outcome += verify(client, stream)
    return outcome + Outcome(met=1, reports=_miscounted(stream, overflow))


def _miscounted(stream: Stream, overflow: Overflow) -> list[str]:
    """Rows are acknowledged or counted as dropped, each once."""
    promises = stream.promises()
    dropped = sum(int(mark.split()[1]) for mark in promises.marks if mark.startswith("dropped"))
    said = 2 * stream.expected.rows
    if promises.count + dropped == said and (dropped > 0) == (overflow is Overflow.DROP):
        return []
    return [f"{promises.count} rows acknowledged and {dropped} dropped of {said}"]


def daemon_while_nobody_reads(overflow: Overflow, repetition: Repetition) -> Outcome:
    """More records come than memory and scratch may hold."""
    with closing(Bridge(memory_limit="256MiB", disk_limit="16MiB")) as bridge:
        stream = _flood(repetition, bridge, overflow, _FLOOD_ROWS)
        with Watched(bridge.pid) as watched, running(engine.run, stream) as process:
            outcome = _stalled(repetition, process, stream, bridge)
        outcome.memory = watched.memory(_MEMORY_LIMIT * 11 // 10)
        with asking(bridge.endpoint, repetition.end) as client:
            return outcome + verify(client, stream) + Outcome(met=1)


def _flood(repetition: Repetition, bridge: Bridge, overflow: Overflow, rows: int) -> Stream:
    return repetition.stream(
        bridge.endpoint,
        rows=rows,
        pace_s=0.0,
        most_rows=256,
        window_bytes=_WINDOW,
        overflow=overflow,
        flush_s=None if overflow is Overflow.BLOCK else 1.0,
    )


def _stalled(
    repetition: Repetition, process: BaseProcess, stream: Stream, bridge: Bridge
) -> Outcome:
    """An engine that drops finishes; one that waits does so until the repetition's time is over."""
    if stream.overflow is Overflow.DROP:
        return finish(repetition, process, stream)
    with asking(bridge.endpoint, repetition.end) as client:
        wait_until(lambda: client.stats().full, repetition.end, "the store is full")
        time.sleep(repetition.stop_s)
    return Outcome()


def daemon_while_trainers_are_stopped(repetition: Repetition) -> Outcome:
    """Trainers have asked for all the pages that they may, and an engine sends on."""
    with ExitStack() as stack:
        bridge = stack.enter_context(
            closing(Bridge(repetition.folder / "store", memory_limit="64MiB"))
        )
        watched = Watched(bridge.pid)
        fill(bridge.endpoint, _PAGES)
        for number in range(_STALLED_TRAINERS):
            report = repetition.folder / f"report{number}"
            reading = Reading(bridge.endpoint, _PAGES, report, repetition.seed)
            process = stack.enter_context(running(fetch_on, reading))
            wait_until(report.exists, repetition.end, "a trainer fetches")
            time.sleep(repetition.rng.uniform(0.0, 0.1))
            assert process.pid is not None
            stack.enter_context(paused(process.pid))
        stream = _flood(repetition, bridge, Overflow.BLOCK, _SMALL_FLOOD_ROWS)
        with watched, running(engine.run, stream) as process:
            outcome = finish(repetition, process, stream)
            time.sleep(repetition.stop_s)
        outcome.memory = watched.memory(_SMALL_LIMIT * 11 // 10 + _STALLED_TRAINERS * _LENT)
        with asking(bridge.endpoint, repetition.end) as client:
            return outcome + verify(client, stream) + Outcome(met=1)


def fetch_on(reading: Reading) -> None:
    """Fetch a trajectory again and again and do nothing with it."""
    import bridge.client.paging  # noqa: F401 - torch, before memory is looked at

    reading.report.touch()
    time.sleep(reading.rest_s)
    with TraceClient(reading.endpoint, timeout_s=reading.timeout_s) as client:
        while True:
            try:
                client.fetch(reading.expected.whole)
            except BridgeUnreachable:
                continue


def read_one_and_rest(reading: Reading) -> None:
    """Ask for many trajectories and take the first."""
    import bridge.client.paging  # noqa: F401 - torch, before memory is looked at

    reading.report.touch()
    time.sleep(reading.rest_s)
    with TraceClient(reading.endpoint, timeout_s=reading.timeout_s) as client:
        coming = client.fetch_all([reading.expected.whole] * 50)
        next(coming)
        time.sleep(reading.timeout_s)


def daemon_among_very_many_clients(repetition: Repetition) -> Outcome:
    """Sixty trainers ask and do not read, 500 clients ask and read, and an engine sends on."""
    with closing(Bridge(memory_limit="256MiB")) as bridge:
        watched = Watched(bridge.pid, ("VmRSS:",))
        fill(bridge.endpoint, _CROWDED)
        reading = repetition.reading(bridge.endpoint, _CROWDED)
        stream = _flood(repetition, bridge, Overflow.BLOCK, _CROWDED_FLOOD_ROWS)
        with watched, running(crowd, reading), running(engine.run, stream) as process:
            outcome = finish(repetition, process, stream)
            wait_until(reading.report.exists, repetition.end, f"{_CLIENTS} clients are answered")
            time.sleep(repetition.stop_s / 2)
        outcome.memory = Memory(watched.peak, _MEMORY_LIMIT * 5 // 4)
        with asking(bridge.endpoint, repetition.end) as client:
            outcome += some_of(client, repetition, _CROWDED)
            return outcome + verify(client, stream) + Outcome(met=1)


def crowd(reading: Reading) -> None:
    """Be very many clients; write the report when all that read have had three answers."""
    asked = encode(Fetch(reading.expected.whole), 0)
    few = encode(Fetch(reading.expected.whole, stop=4), 0)
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 2 * (_SLOW + _CLIENTS))
        for _ in range(_SLOW):
            slow = _connected(context, reading.endpoint)
            for _ in range(_SLOW_QUESTIONS):
                slow.send_multipart(asked)
        clients = [_connected(context, reading.endpoint) for _ in range(_CLIENTS)]
        for answers in count(1):
            time.sleep(_ROUND_S)
            for client in clients:
                client.send_multipart(few)
            for client in clients:
                while not isinstance(decode(client.recv_multipart())[0], PageRows):
                    pass
            if answers == _ANSWERS:
                reading.report.touch()


def _connected(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A client that takes little at a time."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 1)
    socket.set(zmq.RCVBUF, 1 << 16)
    socket.set(zmq.SNDHWM, 0)
    socket.linger = 0
    socket.connect(endpoint)
    return socket


@contextmanager
def pages(_folder: Path) -> Iterator[Lanes]:
    """Daemons with a trajectory of several pages."""
    with closing(Lanes(_filled)) as lanes:
        yield lanes


def _filled() -> Bridge:
    bridge = Bridge()
    fill(bridge.endpoint, _PAGES)
    return bridge


def trainer_while_daemon_is_stopped(repetition: Repetition) -> Outcome:
    """What it asked for and the memory that it lends, however often it asks."""
    with (
        repetition.setting.bridge() as bridge,
        _trainer(fetch_on, repetition, bridge, timeout_s=repetition.stop_s / 5) as watched,
    ):
        time.sleep(_REST_S + repetition.rng.uniform(0.5, 1.0))
        with paused(bridge.pid):
            time.sleep(repetition.stop_s)
        time.sleep(_REST_S)
    # The last answer, which it lets go of when it has the next, and a fetch that was broken off.
    limit = 3 * _PAGES_BYTES + _LENT + _ALLOCATOR
    return Outcome(met=1, memory=watched.memory(limit))


def trainer_that_does_not_read_on(repetition: Repetition) -> Outcome:
    """Of fifty trajectories asked for it holds the one it took and the memory that it lends."""
    with (
        repetition.setting.bridge() as bridge,
        _trainer(read_one_and_rest, repetition, bridge, timeout_s=60.0) as watched,
    ):
        time.sleep(_REST_S + repetition.stop_s)
    limit = _PAGES_BYTES + _LENT + _ALLOCATOR
    return Outcome(met=1, memory=watched.memory(limit))


@contextmanager
def _trainer(
    work: Callable[[Reading], None], repetition: Repetition, bridge: Bridge, timeout_s: float
) -> Iterator[Watched]:
    reading = repetition.reading(bridge.endpoint, _PAGES, rest_s=_REST_S, timeout_s=timeout_s)
    with running(work, reading, fresh=True) as process:
        wait_until(reading.report.exists, repetition.end, "the trainer starts")
        assert process.pid is not None
        with Watched(process.pid) as watched:
            yield watched


def _wait_for_hello(repetition: Repetition, stream: Stream) -> None:
    def told() -> bool:
        return bool(stream.promises().told[stream.expected.grown])

    wait_until(told, repetition.end, "the engine is known")
    time.sleep(_REST_S / 5)


FAULTS = tuple(
    Fault(f"memory: {name}", tier, run, setting, side_by_side=4, share=share)
    for name, tier, run, setting, share in (
        *(
            (f"engine of a stopped daemon, {overflow}", "memory", run, lanes_in_memory, 0.1)
            for overflow in Overflow
            for run in (partial(engine_while_daemon_is_stopped, overflow),)
        ),
        *(
            (f"daemon that nobody reads from, {overflow}", "memory", run, nothing, 0.05)
            for overflow in Overflow
            for run in (partial(daemon_while_nobody_reads, overflow),)
        ),
        (
            "daemon of stopped trainers",
            "disk",
            daemon_while_trainers_are_stopped,
            nothing,
            0.1,
        ),
        (
            "daemon of 60 slow readers and 500 clients",
            "memory",
            daemon_among_very_many_clients,
            nothing,
            0.05,
        ),
        ("trainer of a stopped daemon", "memory", trainer_while_daemon_is_stopped, pages, 0.1),
        ("trainer that does not read on", "memory", trainer_that_does_not_read_on, pages, 0.1),
    )
)
