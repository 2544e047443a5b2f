"""Who waits at a terminal is told for what and for how long."""

from __future__ import annotations

import io
import socket
import sys
import threading

import pytest
from typer.testing import CliRunner

from bridge.cli.app import app
from bridge.cli.patience import waiting_for


class WatchedOutput(io.StringIO):
    """A stderr that one can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.heard.set()
        return written


def test_a_long_wait_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    output = WatchedOutput()
    monkeypatch.setattr(sys, "stderr", output)
    with waiting_for("the bridge at tcp://127.0.0.1:1", 30):
        assert output.heard.wait(60)
    assert output.getvalue().startswith("waiting up to 30 s for the bridge at tcp://127.0.0.1:1 ")


def test_a_short_wait_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[threading.Timer] = []

    class Watched(threading.Timer):
        def start(self) -> None:
            made.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Watched)
    with waiting_for("anything", 30):
        pass
    assert made[0].finished.is_set()


@pytest.mark.parametrize("command", [["gc", "--keep", "1"], ["inspect"], ["top", "--once"]])
def test_commands_wait_as_long_as_they_are_asked_to(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(app, [*command, "--endpoint", endpoint, "--timeout", "1.5"])
    assert result.exit_code == 1
    assert "waiting up to 1.5 s for the bridge at " + endpoint in result.stderr
