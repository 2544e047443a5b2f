"""The launcher's start: help, and every bad start in one sentence, before a model is loaded."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from sglang_trace import launch_server
from sglang_trace.config import add_arguments

ROOT = Path(__file__).parents[2]


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_trace.launch_server", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.strip().splitlines()[-1]


def test_help_has_the_trace_options_in_a_group_and_all_of_sglangs() -> None:
    result = launch("--help")
    assert result.returncode == 0
    group = result.stdout[result.stdout.index("\ntrace:") :]
    bridge = ("bridge", "bridge-keys", "bridge-http", "dir")
    for flag in ("capture", *bridge, "sites", "layers", "bits"):
        assert f"--trace-{flag}" in group
    for flag in ("--model-path", "--attention-backend", "--kv-cache-dtype", "trace_nvfp4"):
        assert flag in result.stdout


def test_an_unreachable_bridge_is_told_within_seconds() -> None:
    begin = time.monotonic()
    result = launch("--trace-capture", "--trace-bridge", "tcp://127.0.0.1:9", "--model-path", "x")
    assert result.returncode == 1
    assert last_line(result).startswith("error: no bridge answers at tcp://127.0.0.1:9; start it:")
    assert time.monotonic() - begin < 60


def test_an_occupied_port_is_told_before_the_model_is_loaded(checkpoint: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        result = launch("--trace-capture", "--model-path", str(checkpoint), "--port", port)
    assert result.returncode == 1
    assert last_line(result).startswith(f"error: Cannot serve on 127.0.0.1:{port}")
    assert "Load weight" not in result.stdout + result.stderr


def test_a_combination_that_is_not_captured_is_told_with_its_reason(checkpoint: Path) -> None:
    speculation = ("--speculative-algorithm", "NGRAM")
    result = launch(
        *("--trace-capture", "--model-path", str(checkpoint)),
        *("--enable-streaming-session", *speculation),
    )
    assert result.returncode == 1
    assert last_line(result).startswith("error: --speculative-algorithm: rejected drafts are")
    assert "; --enable-streaming-session: a session keeps its" in last_line(result)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--trace-bits", "2", "--trace-scale-bits", "2", "--trace-dir", "d"],
            "--trace-dir, --trace-bits, --trace-scale-bits only mean something together with "
            "--trace-capture",
        ),
        (
            ["--trace-capture", "--trace-bridge", "tcp://127.0.0.1:9", "--trace-dir", "d"],
            "--trace-dir is for the server's own bridge",
        ),
        (
            ["--trace-capture", "--trace-bridge", "tcp://127.0.0.1:9", "--trace-bridge-http", "h"],
            "--trace-bridge-http is for the server's own bridge",
        ),
        (
            ["--trace-capture", "--trace-bridge-keys", "k"],
            "--trace-bridge-keys is for another machine's bridge",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_server.main([*arguments, "--model-path", "x"]) == 1
    assert f"error: {sentence}" in capsys.readouterr().err


def test_the_servers_own_bridge_shows_its_status_where_it_is_told_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--trace-capture", "--trace-bridge-http", "127.0.0.1:0"])
    with launch_server.bridge_for(options) as endpoint:
        ready, page = capsys.readouterr().out.splitlines()
        assert ready == f"bridge ready {endpoint}"
        with urllib.request.urlopen(page.removeprefix("status page ") + "metrics") as answer:
            assert f'trace_bridge_info{{endpoint="{endpoint}"' in answer.read().decode()


def test_an_unpatched_sglang_is_told_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from patches.errors import PatchError

    def unpatched(_target: str) -> None:
        raise PatchError("sglang 0.5.23 is not patched: run python -m patches apply sglang")

    monkeypatch.setattr(launch_server, "verify_target", unpatched)
    assert launch_server.main(["--trace-capture", "--model-path", "x"]) == 1
    assert capsys.readouterr().err.endswith("run python -m patches apply sglang\n")


def test_a_server_ended_by_a_signal_has_a_shells_status() -> None:
    assert [launch_server.exit_status(code) for code in (0, 3, -9)] == [0, 3, 137]
