"""The processes of a repetition: a daemon, engines and trainers; each wait has a deadline."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.errors import BridgeUnreachable
from bridge.transport.ports import held_port
from tests.faults.outcome import Hang

T = TypeVar("T")
_LOOK_S = 0.01

# A process forked from one that has everything imported, torch too, starts in milliseconds.
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(
    ["bridge.client.paging", "tests.faults.engine", "tests.faults.trainer"]
)
_fresh = multiprocessing.get_context("spawn")


def wait_until(holds: Callable[[], T], end: float, what: str) -> T:
    """Look until the answer is true and return it.

    Raises:
        Hang: it is not at monotonic time ``end``.
    """
    while not (answer := holds()):
        if time.monotonic() > end:
            raise Hang(what)
        time.sleep(_LOOK_S)
    return answer


class Bridge:
    """A daemon that can be killed, stopped and started again where it listened and kept records."""

    def __init__(self, directory: Path | None = None, **options: Any) -> None:
        self.directory = directory
        self.options = options
        # Nobody else may listen there between a kill and the restart: an engine that goes on would
        # have its rows acknowledged by another daemon.
        self.endpoint = f"tcp://127.0.0.1:{held_port()}"
        self._running = spawn.start(directory, endpoint=self.endpoint, **options)

    @property
    def pid(self) -> int:
        return self._running.process.pid

    def kill(self) -> None:
        """As kill -9 does."""
        self._running.process.kill()
        self._running.stop()

    def start_and_kill(self, after_s: float) -> None:
        """Start it again and kill it so long after that, at the latest when it listens."""
        with suppress(BridgeUnreachable):
            self._running = spawn.start(
                self.directory, endpoint=self.endpoint, ready_timeout_s=after_s, **self.options
            )
            self.kill()

    def restart(self, **options: Any) -> None:
        """Start it again, after a kill."""
        self.options |= options
        self._running = spawn.start(self.directory, endpoint=self.endpoint, **self.options)

    def close(self) -> None:
        """Stop it, also if it is stopped by a signal."""
        if self._running.process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
        self._running.stop()


class Lanes:
    """Daemons for repetitions side by side, each of one at a time and of many in a row.

    A daemon is killed and started again many times on the same store, which fills meanwhile.
    """

    def __init__(self, make: Callable[[], Bridge]) -> None:
        self._make = make
        self._free: SimpleQueue[Bridge] = SimpleQueue()

    @contextmanager
    def bridge(self) -> Iterator[Bridge]:
        """Give a daemon; one with which a repetition failed is not used again."""
        try:
            bridge = self._free.get_nowait()
        except Empty:
            bridge = self._make()
        try:
            yield bridge
        except BaseException:
            bridge.close()
            raise
        self._free.put(bridge)

    def close(self) -> None:
        """Stop all daemons."""
        while not self._free.empty():
            self._free.get().close()


@contextmanager
def lanes_in_memory(_folder: Path) -> Iterator[Lanes]:
    """Daemons without a directory."""
    with closing(Lanes(Bridge)) as lanes:
        yield lanes


@contextmanager
def lanes_on_disk(folder: Path) -> Iterator[Lanes]:
    """Daemons with a directory each."""
    numbers = count()
    with closing(Lanes(lambda: Bridge(folder / f"store{next(numbers)}"))) as lanes:
        yield lanes


@contextmanager
def lanes_that_keep_two_steps(folder: Path) -> Iterator[Lanes]:
    """Daemons with a directory each and --keep 2."""
    numbers = count()
    with closing(Lanes(lambda: Bridge(folder / f"store{next(numbers)}", keep=2))) as lanes:
        yield lanes


@contextmanager
def running(
    work: Callable[[Any], None], argument: Any, *, fresh: bool = False
) -> Iterator[BaseProcess]:
    """Run work(argument) as a process of its own meanwhile; ``fresh``: with today's environment."""
    context = _fresh if fresh else _forked
    process = context.Process(target=work, args=(argument,), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def ended(process: BaseProcess, end: float, what: str) -> None:
    """Wait for the end of a process; raise Hang."""
    process.join(max(0.0, end - time.monotonic()))
    if process.exitcode is None:
        raise Hang(what)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """SIGSTOP meanwhile, then SIGCONT; nothing if the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def asking(endpoint: str, end: float) -> Iterator[TraceClient]:
    """Give a client; no answer before monotonic time ``end`` is a Hang."""
    with TraceClient(endpoint, timeout_s=max(0.1, end - time.monotonic())) as client:
        try:
            yield client
        except BridgeUnreachable as error:
            raise Hang(str(error)) from error
