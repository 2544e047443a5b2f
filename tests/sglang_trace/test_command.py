"""`sglang-trace` passes every option on to the command it names."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sglang_trace import command

RUNNER = CliRunner()


def test_the_version_is_that_of_the_installed_package() -> None:
    result = RUNNER.invoke(command.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"sglang-trace {version('sglang-trace')}\n"


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("serve", "sglang_trace.launch_server.main"), ("train", "megatron_trace.launch.main")],
)
def test_launchers_get_all_arguments_and_give_the_exit_status(
    name: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[list[str]] = []

    def launch(arguments: list[str]) -> int:
        got.append(arguments)
        return 7

    monkeypatch.setattr(launcher, launch)
    arguments = ["--help", "--trace-bits", "4", "--model-path=m", "script.py", "-v"]
    assert RUNNER.invoke(command.app, [name, *arguments]).exit_code == 7
    assert got == [arguments]


@pytest.mark.parametrize("group", ["bridge", "patches"])
def test_the_tools_are_commands_too(group: str) -> None:
    result = RUNNER.invoke(command.app, [group, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_examples_name_commands_that_exist() -> None:
    group: Any = typer.main.get_command(command.app)
    title, *lines = group.epilog.split("\n\n")
    assert title == "Examples:"
    shown = RUNNER.invoke(command.app, ["--help"], env={"COLUMNS": "80"}).stdout
    for line in lines:
        assert line in shown
        script, name, *_ = shlex.split(line)
        assert script == "sglang-trace"
        assert name in group.commands or name == "--install-completion"


def test_a_script_for_shell_completion_is_printed() -> None:
    code = "from sglang_trace.command import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "--show-completion", "bash"],
        capture_output=True,
        text=True,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert result.returncode == 0
    assert "complete -o" in result.stdout
    assert "_SGLANG_TRACE_COMPLETE" in result.stdout


def test_help_of_a_bridge_command_shows_its_example() -> None:
    result = RUNNER.invoke(command.app, ["bridge", "gc", "--help"])
    assert result.exit_code == 0
    assert "python -m bridge gc --keep 2" in result.stdout
