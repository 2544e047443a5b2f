"""One real SGLang server, and the few calls of its HTTP API the demo makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from bridge.transport.ports import held_port

START_TIMEOUT_S = 240
BRIDGE_LINE = "bridge ready "


class ServerFailed(Exception):
    """The server did not start or answered with an error; the message ends with its log."""


@dataclass
class Server:
    """`python -m sglang_trace.launch_server` with `flags`, its log in `log`."""

    model: Path
    log: Path
    flags: list[str]
    port: int = field(default_factory=held_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and returns when it answers.

        Raises:
            ServerFailed: it ended or did not answer in time.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "sglang_trace.launch_server"),
            *("--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--nccl-port", str(held_port())),
            *self.flags,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self) -> None:
        started = time.monotonic()
        while time.monotonic() - started < START_TIMEOUT_S:
            assert self.process is not None
            if (code := self.process.poll()) is not None:
                raise ServerFailed(f"the server ended with exit code {code}:\n{self.log_tail()}")
            if "address already in use" in self.log_tail():
                raise ServerFailed(f"port {self.port} was taken meanwhile:\n{self.log_tail()}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise ServerFailed(f"no answer within {START_TIMEOUT_S} s:\n{self.log_tail()}")

    def stop(self) -> None:
        """Ends the server: SIGTERM to the launcher, then SIGKILL to all its processes."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def url(self) -> str:
        """Base address of the HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bridge(self) -> str:
        """Endpoint of the server's own bridge, from its log."""
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith(BRIDGE_LINE):
                return line.removeprefix(BRIDGE_LINE)
        raise ServerFailed(f"the server started no bridge:\n{self.log_tail()}")

    def version(self) -> str:
        """SGLang's version, as its server process imported it."""
        reply = requests.get(f"{self.url}/server_info", timeout=60)
        reply.raise_for_status()
        return str(reply.json()["version"])

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST `body`; the decoded reply. Raises ServerFailed with the server's own words."""
        reply = requests.post(f"{self.url}{path}", json=body, timeout=600)
        if reply.status_code != 200:
            raise ServerFailed(f"{path} answered {reply.status_code}: {reply.text[:500]}")
        return reply.json()

    def update_weights(self, model: Path, version: str) -> None:
        """SGLang's own update from disk; every row computed from here on carries `version`."""
        body = {"model_path": str(model), "weight_version": version, "flush_cache": True}
        reply = self.post("/update_weights_from_disk", body)
        if not reply["success"]:
            raise ServerFailed(f"weight update refused: {reply['message']}")
