"""Start a bridge daemon as a child of this process."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bridge.errors import BridgeUnreachable

READY = "bridge ready "
STATUS_PAGE = "status page "


@dataclass(frozen=True, slots=True)
class EmbeddedBridge:
    """A running daemon; it stops when this process ends, also after a crash.

    ``status_page`` is the URL of the status page, None without one.
    """

    endpoint: str
    process: subprocess.Popen[bytes]
    status_page: str | None = None

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the daemon; acknowledged records stay in its directory."""
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def start(
    directory: Path | str | None = None,
    *,
    disk_limit: str | None = None,
    memory_limit: str | None = None,
    mooncake: str | None = None,
    spill: Path | str | None = None,
    keep: int | None = None,
    max_version_diff: int | None = None,
    expire_s: int | None = None,
    http: str | None = None,
    endpoint: str = "tcp://127.0.0.1:0",
    ready_timeout_s: float = 60.0,
) -> EmbeddedBridge:
    """Start a daemon on a free loopback port and return when it listens.

    Args:
        directory: where records are kept, safe against crashes; None keeps them in memory and,
            beyond its limit, in scratch space on disk, as long as the daemon runs.
        disk_limit: size such as "64GiB"; None is the default of ``python -m bridge serve``.
        memory_limit: likewise, for records in memory and the index of all records.
        mooncake: HOST:PORT of a Mooncake master, to keep record bytes in its pool.
        spill: directory of the scratch space; None is the system's directory for temporary files.
        keep: RL steps kept (see TraceClient.begin_step); None keeps all.
        max_version_diff: weight versions behind the newest that are kept; None keeps all.
        expire_s: seconds without messages after which an unfinished trajectory expires.
        http: 127.0.0.1:PORT of a status page and metrics; port 0 takes a free one.
        endpoint: the endpoint to listen at.
        ready_timeout_s: maximum time until the daemon listens.

    Raises:
        BridgeUnreachable: the daemon ended or did not listen in time; stderr has the reason.
    """
    options = {
        "--dir": directory,
        "--disk-limit": disk_limit,
        "--memory-limit": memory_limit,
        "--mooncake": mooncake,
        "--spill": spill,
        "--keep": keep,
        "--max-version-diff": max_version_diff,
        "--expire": expire_s,
        "--http": http,
    }
    command = [sys.executable, "-m", "bridge", "serve", "--endpoint", endpoint]
    command += ["--parent", str(os.getpid())]
    for option, value in options.items():
        if value is not None:
            command += [option, str(value)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    lines = _first_lines(process.stdout, 1 if http is None else 2, ready_timeout_s)
    if not lines[0].startswith(READY):
        process.kill()
        process.wait()
        process.stdout.close()
        raise BridgeUnreachable(
            "the embedded bridge did not start; see its reason above and run it by hand: "
            f"python -m bridge serve --endpoint {endpoint}"
        )
    page = None if http is None else lines[1].removeprefix(STATUS_PAGE)
    return EmbeddedBridge(lines[0].removeprefix(READY), process, page)


def _first_lines(stream: IO[bytes], count: int, timeout_s: float) -> list[str]:
    """Return the first lines; fewer if the stream or the time ends before."""
    end = time.monotonic() + timeout_s
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while received.count(b"\n") < count and selector.select(max(0.0, end - time.monotonic())):
            chunk = os.read(stream.fileno(), 4096)
            if not chunk:
                break
            received += chunk
    lines = received.decode(errors="replace").split("\n")
    return [*lines, *[""] * count][:count]
