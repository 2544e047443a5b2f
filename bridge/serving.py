"""Run a daemon as this process: pick the store, listen, stop cleanly."""

from __future__ import annotations

import logging
import os
import signal
from enum import StrEnum
from pathlib import Path

from bridge.daemon import Daemon
from bridge.embedded import READY
from bridge.sizes import parse_size
from bridge.store import DiskStore, MemoryStore, Store


class LogLevel(StrEnum):
    """How much to log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve_until_stopped(
    endpoint: str,
    directory: Path | None,
    disk_limit: str,
    memory_limit: str,
    log_level: LogLevel,
    parent: int | None,
) -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent; raise TraceError if it cannot start."""
    logging.basicConfig(
        level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    store = _store(directory, disk_limit, memory_limit)
    try:
        daemon = Daemon(endpoint, store)
        stop = StopSignal(parent)
        print(f"{READY}{daemon.endpoint}", flush=True)
        daemon.run(stop)
        daemon.close()
    finally:
        store.close()


class StopSignal:
    """True once a signal asked to stop or the parent process is gone."""

    def __init__(self, parent: int | None) -> None:
        self._parent = parent
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self._asked or (self._parent is not None and os.getppid() != self._parent)

    def _ask(self, *_: object) -> None:
        self._asked = True


def _store(directory: Path | None, disk_limit: str, memory_limit: str) -> Store:
    if directory is None:
        return MemoryStore(parse_size(memory_limit))
    return DiskStore(directory, parse_size(disk_limit))
