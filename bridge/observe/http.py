"""Serve the status page, JSON and Prometheus metrics over HTTP in a separate thread."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock, Thread

from prometheus_client.exposition import choose_encoder

from bridge.errors import TraceError
from bridge.observe.logs import Event, event
from bridge.observe.metrics import registry
from bridge.observe.status import Status, to_json

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(?P<port>\d{1,5})")
# The server closes a connection without an answer for so long; if there are too many connections,
# it closes the one that has waited longest.
_TIMEOUT_S = 30.0
_MAX_CONNECTIONS = 32
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; frame-ancestors 'none'; "
        "img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    ),
    "X-Content-Type-Options": "nosniff",
}


class InvalidHttpAddress(TraceError):
    """The server cannot listen at this address."""


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
    """Whether only this machine can reach a host (IPv6 in brackets)."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class StatusServer:
    """Serves /, /status.json and /metrics until it is closed.

    ``status`` is called in the server's threads.

    Raises:
        InvalidHttpAddress: the server cannot listen at the address.
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
    """One thread per connection; connections are few, because engines need open files, too."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, status: Callable[[], Status]) -> None:
        self.status = status
        self.metrics = registry(status)
        self.page = files("bridge.observe").joinpath("page.html").read_bytes()
        self.connections = Connections()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise InvalidHttpAddress(
                f"cannot serve the status page on {host}:{port} ({error.strerror}); "
                "choose another port with --http"
            ) from error

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection."""
        accepted, address = super().get_request()
        self.connections.add(accepted)
        return accepted, address

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Close a connection."""
        assert isinstance(request, socket.socket)
        self.connections.remove(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that are too slow; the base class calls it several times per second."""
        self.connections.end_older_than(time.monotonic() - _TIMEOUT_S)

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Log why a connection ended; the client has left or will send the request again."""
        why = sys.exception()
        log.debug("a connection to the status page ended: %s: %s", type(why).__name__, why)


class Connections:
    """Open connections in the order of their last answer; any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._since: OrderedDict[socket.socket, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def add(self, connection: socket.socket) -> None:
        """Add a connection; close the oldest one if there are too many."""
        with self._lock:
            self._since[connection] = time.monotonic()
            while len(self._since) > _MAX_CONNECTIONS:
                _end(self._since.popitem(last=False)[0])

    def answered(self, connection: socket.socket) -> None:
        """Record that a request on the connection was answered."""
        with self._lock:
            if self._since.pop(connection, None) is not None:
                self._since[connection] = time.monotonic()

    def remove(self, connection: socket.socket) -> None:
        """Remove a closed connection."""
        with self._lock:
            self._since.pop(connection, None)

    def end_older_than(self, moment: float) -> None:
        """Close the connections without an answer since ``moment``."""
        with self._lock:
            while self._since and next(iter(self._since.values())) < moment:
                _end(self._since.popitem(last=False)[0])


def _end(connection: socket.socket) -> None:
    """Shut the connection down; its thread then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    path = ""  # if the request has none
    protocol_version = "HTTP/1.1"
    server_version = "sglang-trace"
    sys_version = ""
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Answer one of the three paths."""
        if not self._has_loopback_host():
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

    def _has_loopback_host(self) -> bool:
        """Whether the Host header is a loopback name; otherwise a website could read the answer."""
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
        self.server.connections.answered(self.connection)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an error without any text of the request."""
        self.close_connection = True
        self.request_version = (
            self.protocol_version
        )  # a request line without a version would get no status
        self._answer(code, "text/plain", f"{HTTPStatus(code).phrase}\n".encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base
        """Log requests with the daemon's logger."""
        log.debug(format, *args, extra=event(Event.HTTP_REQUEST, path=self.path))
