"""The status page's server: bad requests, slow clients and very many of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bridge.client.client import TraceClient
from bridge.layout import RecordLayout
from bridge.observe import http
from bridge.observe.http import StatusServer
from bridge.observe.status import Status
from bridge.producer.producer import RecordProducer
from tests.bridge.observe.observed import Observed, observed_daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Observed]:
    with observed_daemon(tmp_path / "log") as started:
        yield started


def _connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def _received(connection: socket.socket) -> bytes:
    """Everything until the other side closes the connection."""
    received = b""
    try:
        while chunk := connection.recv(1 << 16):
            received += chunk
    except ConnectionResetError:
        pass
    return received


BAD = {
    b"hello\0there\r\n\r\n": b"400",
    b"GET\r\n\r\n": b"400",
    b"GET / HTTP/1.1 more\r\n\r\n": b"400",
    b"GET / HTTP/9.9\r\n\r\n": b"505",
    b"GET / HTTP/x\r\n\r\n": b"400",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n": b"400",
    b"\x1b[31m / HTTP/1.1\r\n\r\n": b"501",
    b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n": b"501",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n": b"431",
    b"GET /" + b"a" * (1 << 17) + b" HTTP/1.1\r\n\r\n": b"414",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: \xff;q=x,,/\r\n"
    b"Connection: close\r\n\r\n": b"200",
}


def test_bad_requests_get_a_status_and_the_page_is_served_on(daemon: Observed) -> None:
    for request, status in BAD.items():
        with closing(_connected(daemon.url)) as connection:
            connection.sendall(request)
            answer = _received(connection)
        assert answer.startswith(b"HTTP/1.1 " + status), (request[:40], answer[:80])
        assert b"\x1b" not in answer
    for _ in range(3):  # gone before the answer
        with closing(_connected(daemon.url)) as connection:
            connection.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert daemon.get("status.json")
    assert daemon.stderr.read_text() == ""


def test_very_many_slow_connections_keep_nobody_out(daemon: Observed, layout: RecordLayout) -> None:
    with ExitStack() as opened:
        for _ in range(400):
            slow = opened.enter_context(closing(_connected(daemon.url)))
            slow.sendall(b"GET / HTT")
        for _ in range(3):
            assert daemon.get("status.json")
        with RecordProducer(daemon.endpoint) as engine, TraceClient(daemon.endpoint) as trainer:
            engine.register("e", layout)
            assert trainer.stats().engines == 1
        assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 100
    assert daemon.get("status.json")


def test_a_client_that_sends_its_request_byte_by_byte_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_TIMEOUT_S", 1.0)

    def status() -> Status:
        raise AssertionError("nobody has asked")

    with (
        closing(StatusServer("127.0.0.1:0", status)) as server,
        closing(_connected(server.url)) as slow,
    ):
        slow.settimeout(0.1)
        ended = False
        while not ended:
            try:
                slow.sendall(b"G")
                ended = slow.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
