"""A small record layout, rows whose bytes tell where they belong, and daemons to talk to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from bridge.client.connection import Connection
from bridge.daemon import Daemon, spawn
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.store import MemoryStore, Store
from bridge.transport.shared_memory import ShmSegment
from bridge.wire import BufferHandle, Message, PageRows, Policy, ShmPageRows

# A busy machine is no failure: examples are bounded in number, the session in time.
settings.register_profile("bridge", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bridge")

SITES = (Site.FC1, Site.K, Site.V, Site.ROUTES)


@pytest.fixture(scope="session")
def layout() -> RecordLayout:
    shape = ModelShape(
        num_layers=4,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        top_k=2,
        num_kv_heads=2,
        head_dim=32,
        moe_layers=(0, 1, 2, 3),
        attention_layers=(0, 1, 2, 3),
    )
    return RecordLayout(shape, (2, 3), SITES, bits=1)


@pytest.fixture(scope="session")
def make_rows(layout: RecordLayout) -> Callable[..., NDArray[np.uint8]]:
    """make_rows(part, rows, engine="e") -> uint8 [n, R]; equal arguments, equal bytes."""

    def make(part: Part, rows: Any, engine: str = "e") -> NDArray[np.uint8]:
        width = layout.row_bytes(part)
        salt = sum(engine.encode()) + (7 if part is Part.KV else 0)
        return np.stack(
            [
                np.random.default_rng((salt, int(row))).integers(0, 256, width, dtype=np.uint8)
                for row in rows
            ]
        )

    return make


@contextmanager
def _serve(store: Store, policy: Policy | None = None) -> Iterator[str]:
    daemon = Daemon("tcp://127.0.0.1:0", store, policy)
    stop = threading.Event()
    thread = threading.Thread(target=daemon.run, args=(stop.is_set,))
    thread.start()
    try:
        yield daemon.endpoint
    finally:
        stop.set()
        thread.join()
        daemon.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """serve(store, policy=None) -> endpoint of a daemon in a thread of this process."""
    with ExitStack() as daemons:
        yield lambda *arguments: daemons.enter_context(_serve(*arguments))


@pytest.fixture
def endpoint(serve: Callable[[Store], str]) -> str:
    return serve(MemoryStore(64 << 20))


@pytest.fixture(params=["socket", "memory"])
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have rows come through the socket, or all of them through memory that the client lends."""
    arrived: set[type[Message]] = set()
    told = Connection._next

    def watched(self: Connection, *arguments: Any) -> Message:
        reply = told(self, *arguments)
        if isinstance(reply, PageRows | ShmPageRows):
            arrived.add(type(reply))
        return reply

    monkeypatch.setattr(Connection, "_next", watched)
    if request.param == "socket":
        monkeypatch.setattr("bridge.client.connection.is_loopback", lambda _: False)
    yield request.param
    assert arrived <= {PageRows if request.param == "socket" else ShmPageRows}


@pytest.fixture
def small_pages(through: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """small_pages(page_bytes, piece_bytes): pages of at most so many bytes from here on."""

    def make(page_bytes: int, piece_bytes: int) -> None:
        acquire = ShmSegment.acquire

        def shortened(self: ShmSegment) -> BufferHandle | None:
            buffer = acquire(self)
            return None if buffer is None else replace(buffer, nbytes=page_bytes)

        monkeypatch.setattr(ShmSegment, "acquire", shortened)
        monkeypatch.setattr("bridge.daemon.fetch.answer.MAX_PAGE_BYTES", page_bytes)
        monkeypatch.setattr("bridge.daemon.fetch.gather.CHUNK_BYTES", piece_bytes)

    return make


@pytest.fixture
def start_process() -> Iterator[Callable[..., spawn.EmbeddedBridge]]:
    """The arguments of embedded.start; daemons in processes of their own, ended with the test."""
    started: list[spawn.EmbeddedBridge] = []

    def start(*args: Any, **kwargs: Any) -> spawn.EmbeddedBridge:
        started.append(spawn.start(*args, **kwargs))
        return started[-1]

    yield start
    for bridge in started:
        bridge.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("needs root on Linux to mount a small file system")
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
