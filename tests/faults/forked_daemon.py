"""A daemon forked from a process that has everything imported: it listens after milliseconds."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from bridge.cli.units import parse_size
from bridge.daemon.run import Access, Limits, serve_until_stopped
from bridge.daemon.spawn import READY
from bridge.errors import TraceError
from bridge.observe.logs import LogFormat, Logging, LogLevel
from bridge.wire import Policy
from tests.faults.failpoints import Plan, attach
from tests.faults.outcome import Hang

REFUSED, BROKEN = 1, 70  # exit statuses: a sentence was told, something was not handled
_LOOK_S = 0.005
Work = Callable[[], None]


class Forked:
    """A process that does ``work`` and whose calls on files below a folder a plan counts."""

    def __init__(self, plan: Plan, folder: Path, work: Work) -> None:
        self._output, into = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._output)
            _child(into, plan, folder, work)
        os.close(into)
        self.status: int | None = None

    def line(self, end: float) -> str:
        """Return the first line that it prints, empty if it ends before; raise Hang."""
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while b"\n" not in received:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise Hang("the daemon neither starts nor ends")
                chunk = os.read(self._output, 4096)
                if not chunk:
                    return ""
                received += chunk
        return received.decode().partition("\n")[0]

    def has_ended(self) -> bool:
        """Whether it has; ``status`` is then as that of subprocess: -9 for a kill."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait(self, end: float) -> int:
        """Return the exit status; raise Hang."""
        while not self.has_ended():
            if time.monotonic() > end:
                raise Hang("the daemon does not end")
            time.sleep(_LOOK_S)
        assert self.status is not None
        return self.status

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal unless it has ended."""
        if not self.has_ended():
            os.kill(self.pid, number)

    def close(self) -> None:
        """End it as kill -9 does."""
        self.kill()
        if self.status is None:
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
        os.close(self._output)


def daemon(directory: Path, keep: int, disk_limit: str, sabotage: Work) -> Work:
    """Return the work of a daemon over a store; ``sabotage`` is done to it before."""

    def serve() -> None:
        sabotage()
        serve_until_stopped(
            "tcp://127.0.0.1:0",
            Access(None, False),
            Limits(directory, None, 64 << 20, parse_size(disk_limit)),
            Policy(keep=keep),
            Logging(LogLevel.ERROR, LogFormat.TEXT),
            None,
            None,
        )

    return serve


def endpoint_of(line: str) -> str:
    """Return where a daemon says that it listens, empty if it does not."""
    return line.removeprefix(READY) if line.startswith(READY) else ""


def _child(output: int, plan: Plan, folder: Path, work: Work) -> NoReturn:
    """Do the work and end without what a fork must not do twice."""
    status = BROKEN
    try:
        os.dup2(output, 1)
        attach(plan.file, folder)
        work()
        sys.stdout.flush()
        status = 0
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
