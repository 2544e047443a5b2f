"""The real server in a process of its own, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from bridge.client.client import TraceClient
from bridge.transport.ports import held_port

# On a GPU host the first start compiles kernels.
START_TIMEOUT_S = 400
FLUSH_TIMEOUT_S = 20
REQUEST_TIMEOUT_S = 240
ROOT = Path(__file__).parents[2]


@dataclass
class LiveServer:
    """A running `sglang_trace.launch_server`; `log` holds what it printed."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def bridge(self) -> str:
        """The endpoint of its own bridge."""
        found = re.search(r"bridge ready (\S+)", self.log.read_text(errors="replace"))
        assert found is not None, "the launcher prints where its own bridge listens"
        return found[1]

    def client(self) -> TraceClient:
        return TraceClient(self.bridge)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"http://127.0.0.1:{self.port}/{path}"
        answer = requests.post(url, json=body or {}, timeout=REQUEST_TIMEOUT_S)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def flush_cache(self) -> None:
        """Empty the prefix cache; waits for a pass that is still under way."""
        url = f"http://127.0.0.1:{self.port}/flush_cache"
        wait = {"timeout": FLUSH_TIMEOUT_S}
        requests.post(url, params=wait, timeout=REQUEST_TIMEOUT_S).raise_for_status()

    def generate(
        self, rid: str, prompt: list[int] | str, new_tokens: int, **extra: Any
    ) -> dict[str, Any]:
        """Generate greedily (unless told otherwise) exactly `new_tokens` tokens."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        sampling |= extra.pop("sampling_params", {})
        body = {key: prompt, "rid": rid, "sampling_params": sampling, "return_logprob": True}
        return self.post("generate", body | extra)

    def generate_together(self, requested: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send all requests at once and return the replies in order."""
        with ThreadPoolExecutor(len(requested)) as pool:
            return list(pool.map(lambda request: self.generate(**request), requested))

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[LiveServer]:
    """Start the launcher, wait until it serves, and end it and all its processes afterwards."""
    port = held_port()
    command = [sys.executable, "-m", "sglang_trace.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--nccl-port", str(held_port()), *flags]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            # The matrices are tiny: a second thread costs more than it saves.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = LiveServer(process, port, log)
    try:
        wait_until_ready(server)
        yield server
    finally:
        stop(process)


def wait_until_ready(server: LiveServer) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while "The server is fired up" not in server.output():
        assert server.process.poll() is None, f"the server ended:\n{server.output()[-4000:]}"
        assert time.monotonic() < end, f"the server is not ready:\n{server.output()[-4000:]}"
        time.sleep(0.3)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask politely, then end every process of the session that the launcher leads."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def tokens_of(reply: dict[str, Any], prompt: list[int]) -> list[int]:
    """The whole sequence of a reply: its prompt and the sampled tokens."""
    return [*prompt, *reply["output_ids"]]
