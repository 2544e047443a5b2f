"""`sglang-trace` passes every option on to the command it names."""

from __future__ import annotations

from importlib.metadata import version

import pytest
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
