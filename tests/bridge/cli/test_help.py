"""Every command explains itself with examples that it accepts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bridge.cli.app import app

GROUP: Any = typer.main.get_command(app)
PREFIX = ["python", "-m", "bridge"]
ROOT = Path(__file__).parents[3]


def _examples(name: str) -> list[str]:
    title, *lines = GROUP.commands[name].epilog.split("\n\n")
    assert title in {"Example:", "Examples:"}
    return lines


@pytest.mark.parametrize("name", GROUP.commands)
def test_help_of_a_command_shows_its_examples(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    shown = [line.strip() for line in result.stdout.splitlines()]
    assert _examples(name)
    assert set(_examples(name)) <= set(shown)


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name in GROUP.commands for line in _examples(name)]
)
def test_every_example_is_accepted_by_its_command(name: str, line: str) -> None:
    words = shlex.split(line)
    assert words[:4] == [*PREFIX, name]
    GROUP.commands[name].make_context(name, words[4:])


def test_an_option_that_does_not_exist_is_not_accepted() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        GROUP.commands["serve"].make_context("serve", ["--no-such-option"])


def test_the_version_is_that_of_the_installed_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"sglang-trace {version('sglang-trace')}\n"


def test_help_says_how_to_install_shell_completion() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "sglang-trace --install-completion" in " ".join(shown.split())


def _completed(*words: str) -> list[str]:
    environment = {
        **os.environ,
        "_SGLANG_TRACE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["sglang-trace", *words]),
        "COMP_CWORD": str(len(words)),
    }
    code = "from sglang_trace.command import main; main()"
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_shell_completes_commands_and_options_of_the_bridge() -> None:
    assert _completed("bridge", "ver") == ["verify"]
    assert {"--dir", "--disk-limit"} == set(_completed("bridge", "serve", "--di"))
