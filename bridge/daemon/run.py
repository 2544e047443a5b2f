"""Run a daemon in this process: open the store, listen, stop cleanly."""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bridge.daemon.memory.malloc import tune_malloc
from bridge.daemon.server import Daemon
from bridge.daemon.spawn import READY, STATUS_PAGE
from bridge.errors import TraceError
from bridge.observe.logs import Event, Logging, event
from bridge.observe.status import Status
from bridge.store import CachedStore, DiskStore, MemoryStore, MooncakeStore, Store
from bridge.store.disk.scratch import scratch_store
from bridge.store.pool_directory import refuse_pooled
from bridge.transport.curve_keys import BridgeKeys
from bridge.wire import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the daemon stores records, and size limits.

    directory   stores records across crashes; None: memory, then scratch space under ``spill``
    memory      bytes, as ``disk``
    spill       None: the system's directory for large temporary files
    mooncake    HOST:PORT of the master of a pool for record bytes; the rest stays in ``directory``
    """

    directory: Path | None
    spill: Path | None
    memory: int
    disk: int
    mooncake: str | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Allowed clients: those of a key file, or with ``insecure`` everybody.

    Without both only processes of this machine.
    """

    keys: Path | None
    insecure: bool

    def bridge_keys(self) -> BridgeKeys | None:
        """Read the key file; raise InvalidKeys."""
        if self.keys is not None and self.insecure:
            raise TraceError("--keys and --insecure contradict each other; give one of them")
        return None if self.keys is None else BridgeKeys.load(self.keys)


def serve_until_stopped(
    endpoint: str,
    access: Access,
    limits: Limits,
    policy: Policy,
    logs: Logging,
    http: str | None,
    parent: int | None,
) -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent; raise TraceError if it cannot start."""
    logs.start()
    tune_malloc()
    _take_all_files()
    keys = access.bridge_keys()
    store = _store(limits)
    try:
        with (
            closing(Daemon(endpoint, store, policy, keys=keys, insecure=access.insecure)) as daemon,
            _status_page(http, daemon.monitor.newest) as url,
        ):
            stop = StopSignal(parent)
            print(f"{READY}{daemon.endpoint}", flush=True)
            if url is not None:
                print(f"{STATUS_PAGE}{url}", flush=True)
            ready = event(Event.DAEMON_READY, endpoint=daemon.endpoint, store=store.tier, http=url)
            log.info("serving %s at %s", store.tier, daemon.endpoint, extra=ready)
            daemon.run(stop)
        log.info("stopped", extra=event(Event.DAEMON_STOPPED, endpoint=daemon.endpoint))
    finally:
        store.close()


def _take_all_files() -> None:
    """Raise the limit of open files to the maximum, because every client needs one."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


@contextmanager
def _status_page(address: str | None, status: Callable[[], Status]) -> Iterator[str | None]:
    """Serve the status over HTTP inside the context; yield the URL, None without an address."""
    if address is None:
        yield None
        return
    from bridge.observe.http import StatusServer

    server = StatusServer(address, status)
    try:
        yield server.url
    finally:
        server.close()


class StopSignal:
    """Becomes true after a stop signal or after the parent process has ended."""

    def __init__(self, parent: int | None) -> None:
        self._parent = parent
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def __call__(self) -> bool:
        """Whether the daemon has to stop."""
        return self._asked or (self._parent is not None and os.getppid() != self._parent)

    def _ask(self, *_: object) -> None:
        self._asked = True


def _store(limits: Limits) -> Store:
    memory, disk = limits.memory, limits.disk
    if limits.mooncake is not None:
        if limits.directory is None:
            raise TraceError("--mooncake needs --dir: only record bytes go to the pool")
        return CachedStore(MooncakeStore(limits.directory, disk, limits.mooncake), memory)
    if limits.directory is not None:
        refuse_pooled(limits.directory)
        return CachedStore(DiskStore(limits.directory, disk), memory)
    return MemoryStore(memory, scratch_store(limits.spill, disk))
