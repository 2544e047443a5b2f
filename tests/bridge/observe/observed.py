"""A daemon in a process of its own that shows its status over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.observe.status import Status, from_json


@dataclass(frozen=True)
class Observed:
    endpoint: str
    url: str
    process: subprocess.Popen[str]
    stderr: Path

    def get(self, path: str, **headers: str) -> str:
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def status_when(self, holds: Callable[[Status], bool]) -> Status:
        """The first status that is as asked; documents are renewed once a second."""
        end = time.monotonic() + 30
        while not holds(status := from_json(self.get("status.json").encode())):
            assert time.monotonic() < end, f"never came about: {status}"
            time.sleep(0.1)
        return status

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0

    def log(self) -> list[dict[str, Any]]:
        """What a daemon with --log-format json has logged."""
        return [json.loads(line) for line in self.stderr.read_text().splitlines()]


@contextmanager
def observed_daemon(stderr: Path, *options: str) -> Iterator[Observed]:
    command = [sys.executable, "-m", "bridge", "serve", "--endpoint", "tcp://127.0.0.1:0"]
    command += ["--http", "127.0.0.1:0", *options]
    with (
        stderr.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().split()[-1]
            url = process.stdout.readline().split()[-1]
            yield Observed(endpoint, url, process, stderr)
        finally:
            process.kill()
