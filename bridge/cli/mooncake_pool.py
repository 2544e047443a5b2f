"""A Mooncake pool of one machine: its master, and one process whose memory is the pool."""

from __future__ import annotations

import ctypes
import importlib.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bridge.daemon.run import StopSignal
from bridge.errors import TraceError
from bridge.transport.ports import held_port

POOL_READY = "mooncake ready "
_HOST = "127.0.0.1"
_START_S = 30.0
_STOP_S = 10.0
_LOOK_S = 0.2
# Lifetime of half-written values of a dead bridge; Mooncake's default is 10 minutes.
_HALF_WRITTEN_S = 20
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class MooncakeFailed(TraceError):
    """A process of the pool cannot start or has ended."""


def run_until_stopped(nbytes: int, port: int, parent: int | None) -> None:
    """Run the pool; print its master's address once it has memory.

    Raises:
        MooncakeFailed: one of its processes ends; Mooncake's own reason is on stderr.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise MooncakeFailed("Mooncake is not installed; pip install 'sglang-trace[mooncake]'")
    _check_free(port)
    stop = StopSignal(parent)
    master, segment = _commands(nbytes, port)
    with ExitStack() as processes:
        running = []
        for command, listens in ((master, port), segment):
            process = processes.enter_context(_running(command))
            running.append(process)
            if not _wait_for(process, listens, stop):
                return
        print(f"{POOL_READY}{_HOST}:{port}", flush=True)
        while not stop():
            _raise_if_ended(running)
            time.sleep(_LOOK_S)


def _commands(nbytes: int, port: int) -> tuple[list[str], tuple[list[str], int]]:
    """Return (command of the master, command of the segment, port of the segment)."""
    metrics, service = held_port(), held_port()
    quiet = ["--logtostderr", "--minloglevel=2"]
    master = [sys.executable, "-m", "mooncake.cli", f"--rpc_address={_HOST}", f"--rpc_port={port}"]
    master += [f"--metrics_host={_HOST}", f"--metrics_port={metrics}", *quiet]
    master += [f"--put_start_discard_timeout_sec={_HALF_WRITTEN_S // 2}"]
    master += [f"--put_start_release_timeout_sec={_HALF_WRITTEN_S}"]
    segment = [sys.executable, "-m", "mooncake.cli_client", f"--host={_HOST}", f"--port={service}"]
    segment += [f"--master_server_address={_HOST}:{port}", "--metadata_server=P2PHANDSHAKE"]
    segment += [f"--global_segment_size={nbytes} B", *quiet]
    return master, (segment, service)


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that ends with this one, also after a crash."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for(process: subprocess.Popen[bytes], port: int, stop: StopSignal) -> bool:
    """Return True when the process listens, False if asked to stop before."""
    end = time.monotonic() + _START_S
    while not stop():
        _raise_if_ended([process])
        try:
            socket.create_connection((_HOST, port), timeout=_LOOK_S).close()
            return True
        except OSError:
            time.sleep(_LOOK_S)
        if time.monotonic() > end:
            raise MooncakeFailed(f"Mooncake does not listen at {_HOST}:{port} after {_START_S} s")
    return False


def _raise_if_ended(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is not None:
            raise MooncakeFailed(
                f"a process of the Mooncake pool ended with status {process.returncode}; see its "
                "reason above, and choose another --port if this one is in use or a smaller --size "
                "if memory is short"
            )


def _check_free(port: int) -> None:
    """Raise MooncakeFailed if another process has the port: the segment would join its pool."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except (OSError, OverflowError) as error:
            raise MooncakeFailed(
                f"cannot listen on {_HOST}:{port} ({error}); choose another --port"
            ) from error
