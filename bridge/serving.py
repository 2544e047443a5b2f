"""Run a daemon as this process: pick the store, listen, stop cleanly."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bridge.daemon import Daemon
from bridge.daemon.heap import keep_freed_memory
from bridge.embedded import READY
from bridge.errors import TraceError
from bridge.sizes import parse_size
from bridge.store import CachedStore, DiskStore, MemoryStore, MooncakeStore, Store
from bridge.store.pool_name import refuse_pooled
from bridge.store.scratch import scratch_store
from bridge.wire import Policy


class LogLevel(StrEnum):
    """How much to log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Limits:
    """Where records live and how much of them.

    directory   keeps records across crashes; None: memory, then scratch space under ``spill``
    spill       None is the system's place for temporary files that may be large
    mooncake    HOST:PORT of the master of a pool for record bytes; the rest stays in ``directory``
    """

    directory: Path | None
    spill: Path | None
    memory: str
    disk: str
    mooncake: str | None = None


def serve_until_stopped(
    endpoint: str, limits: Limits, policy: Policy, log_level: LogLevel, parent: int | None
) -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent; raise TraceError if it cannot start."""
    logging.basicConfig(
        level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    keep_freed_memory()
    store = _store(limits)
    try:
        daemon = Daemon(endpoint, store, policy)
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


def _store(limits: Limits) -> Store:
    memory, disk = parse_size(limits.memory), parse_size(limits.disk)
    if limits.mooncake is not None:
        if limits.directory is None:
            raise TraceError("--mooncake needs --dir: only record bytes go to the pool")
        return CachedStore(MooncakeStore(limits.directory, disk, limits.mooncake), memory)
    if limits.directory is not None:
        refuse_pooled(limits.directory)
        return CachedStore(DiskStore(limits.directory, disk), memory)
    return MemoryStore(memory, scratch_store(limits.spill, disk))
