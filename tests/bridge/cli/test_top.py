"""`python -m bridge top` on running daemons."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from typer.testing import CliRunner

from bridge.cli.app import app
from bridge.cli.top import duration
from bridge.client.client import TraceClient
from bridge.daemon.spawn import EmbeddedBridge
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer

NOBODY = "tcp://127.0.0.1:1"
HOSTILE = "[red]engine[/red]\x1b[31m"


@pytest.fixture
def bridge(start_process: Callable[..., EmbeddedBridge], layout: RecordLayout) -> EmbeddedBridge:
    """A daemon with one engine and no --http."""
    started = start_process(memory_limit="8MiB")
    with RecordProducer(started.endpoint) as engine, TraceClient(started.endpoint) as trainer:
        engine.register(HOSTILE, layout)
        engine.count_dropped(Part.FORWARD, 1234)
        engine.send_trajectory("t", 0, [1], [-1], "open")
        engine.flush()
        trainer.begin_step(41)
    return started


def test_top_shows_every_daemon_and_its_engines_once(
    bridge: EmbeddedBridge, start_process: Callable[..., EmbeddedBridge]
) -> None:
    other = start_process()
    arguments = ["top", "--once", "--endpoint", bridge.endpoint, "--endpoint", other.endpoint]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0
    shown = (bridge.endpoint, other.endpoint, "serves", "41 /", "1 / 0 / 0", "of 8.0 MiB", "1,234")
    assert all(text in result.stdout for text in shown)
    assert "[red]engine[/red]?[31m" in result.stdout


def test_top_prints_status_documents_as_json(bridge: EmbeddedBridge) -> None:
    result = CliRunner().invoke(app, ["top", "--json", "--endpoint", bridge.endpoint])
    (document,) = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["endpoint"] == bridge.endpoint
    assert document["pid"] == bridge.process.pid
    assert document["held"]["step"] == 41
    assert document["trajectories"] == {"open": 1, "finished": 0, "aborted": 0}
    (engine,) = document["engines"]
    assert (engine["engine"], engine["dropped_rows"]) == (HOSTILE, 1234)


def test_a_daemon_that_does_not_answer_is_told_beside_the_others(bridge: EmbeddedBridge) -> None:
    endpoints = ["--endpoint", bridge.endpoint, "--endpoint", NOBODY]
    as_json = CliRunner().invoke(app, ["top", "--json", *endpoints])
    alive, silent = json.loads(as_json.stdout)
    assert alive["pid"] == bridge.process.pid
    assert silent["endpoint"] == NOBODY
    assert "python -m bridge serve" in silent["error"]
    once = CliRunner().invoke(app, ["top", "--once", *endpoints], env={"COLUMNS": "200"})
    assert "no bridge answers" in once.stdout
    assert as_json.exit_code == once.exit_code == 1


def test_top_renews_itself_until_ctrl_c(bridge: EmbeddedBridge) -> None:
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge", "top", "--endpoint", bridge.endpoint],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        env={**os.environ, "COLUMNS": "120", "LINES": "60", "TERM": "xterm"},
        # A shell that runs the tests in the background has it ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(its_end)
    try:
        _read_until(terminal, b"41 /")
        with TraceClient(bridge.endpoint) as trainer:
            trainer.begin_step(42)
        shown = _read_until(terminal, b"42 /")
        process.send_signal(signal.SIGINT)
        # What is still shown has to be read: a terminal that is full would hold the process up.
        shown += _read_to_the_end(terminal)
        assert process.wait() == 0, shown.decode(errors="replace")
        assert b"Traceback" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def _read_until(terminal: int, wanted: bytes) -> bytes:
    shown = b""
    while wanted not in shown:
        shown += os.read(terminal, 1 << 16)
    return shown


def _read_to_the_end(terminal: int) -> bytes:
    shown = b""
    with suppress(OSError):  # EIO: the process has closed the other end
        while chunk := os.read(terminal, 1 << 16):
            shown += chunk
    return shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (61, "1 min 1 s"), (3 * 3600 + 59, "3 h 0 min"), (49 * 3600, "2 d 1 h")],
)
def test_time_spans_have_one_or_two_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
