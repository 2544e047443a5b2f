"""Serve the status over HTTP from a thread of its own: page, JSON and Prometheus metrics."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Thread

from prometheus_client.exposition import choose_encoder

from bridge.errors import TraceError
from bridge.observe.logs import Event, event
from bridge.observe.metrics import registry
from bridge.observe.status import Status, to_json

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(?P<port>\d{1,5})")
_PATIENCE_S = 30.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; frame-ancestors 'none'; "
        "img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    ),
    "X-Content-Type-Options": "nosniff",
}


class InvalidHttpAddress(TraceError):
    """The status page cannot be served there."""


def checked_address(address: str) -> tuple[str, int]:
    """Return (host, port) of a loopback address; raise InvalidHttpAddress for any other."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise InvalidHttpAddress(
            f"{address!r} is not an address for --http; write it as 127.0.0.1:PORT (0: any free)"
        )
    if not _is_loopback(match["host"]):
        raise InvalidHttpAddress(
            f"{address} is not a loopback address and the status page has no password; "
            "use --http 127.0.0.1:PORT and an SSH tunnel or a reverse proxy that asks for one"
        )
    host = "127.0.0.1" if match["host"] == "localhost" else match["host"].strip("[]")
    return host, int(match["port"])


def _is_loopback(host: str) -> bool:
    """Whether a host, IPv6 in brackets, is one that only this machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class StatusServer:
    """Serves /, /status.json and /metrics until it is closed.

    ``status`` is called in the server's threads.

    Raises:
        InvalidHttpAddress: it cannot listen there.
    """

    def __init__(self, address: str, status: Callable[[], Status]) -> None:
        self._server = _Server(*checked_address(address), status)
        port = self._server.server_address[1]
        self.url = f"http://{address.rpartition(':')[0]}:{port}/"
        self._thread = Thread(target=self._server.serve_forever, name="status-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, status: Callable[[], Status]) -> None:
        self.status = status
        self.metrics = registry(status)
        self.page = files("bridge.observe").joinpath("page.html").read_bytes()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise InvalidHttpAddress(
                f"cannot serve the status page on {host}:{port} ({error.strerror}); "
                "choose another port with --http"
            ) from error


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "sglang-trace"
    sys_version = ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        """Answer one of the three paths."""
        if not self._asked_by_a_loopback_name():
            self._answer(403, "text/plain", b"ask for 127.0.0.1 or localhost\n")
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page)
        elif self.path == "/status.json":
            self._answer(200, "application/json", to_json(self.server.status()))
        elif self.path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.server.metrics))
        else:
            self._answer(404, "text/plain", b"ask for /, /status.json or /metrics\n")

    do_HEAD = do_GET

    def _asked_by_a_loopback_name(self) -> bool:
        """Refuse names that a website has pointed here: its scripts could read the answer."""
        return _is_loopback(re.sub(r":\d+$", "", self.headers.get("Host", "")))

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base
        """Log requests like everything else."""
        log.debug(format, *args, extra=event(Event.HTTP_REQUEST, path=self.path))
