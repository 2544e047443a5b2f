"""Every hook of the series is called by the SGLang that a process imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from patches.check import live
from patches.check.sites import hook_sites
from patches.config import select_target
from sglang_trace.preflight import hook_check

CHECK = "from sglang_trace.preflight import hook_check; hook_check.check_{}()"
ROOT = Path(__file__).parents[3]


def test_the_installed_sglang_calls_every_hook() -> None:
    hook_check.check_scheduler()
    hook_check.check_server()


def test_every_hook_of_the_series_is_checked_in_some_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: set[str] = set()
    hooks = {call.hook for call in hook_sites(select_target("sglang"))}
    monkeypatch.setattr(
        hook_check,
        "require_live_hooks",
        lambda _name, wanted: checked.update(filter(wanted, hooks)),
    )
    hook_check.check_scheduler()
    in_scheduler = set(checked)
    hook_check.check_server()
    assert checked == hooks
    assert checked - in_scheduler == set(hook_check.SERVER_HOOKS)


def test_a_function_that_lost_its_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "forward", lambda self, batch: batch)
    with pytest.raises(
        hook_check.HookNotLive,
        match=r"ModelRunner\.forward does not call our hook on_forward.*patches apply sglang",
    ):
        hook_check.check_scheduler()


def test_a_function_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import schedule_batch

    monkeypatch.delattr(schedule_batch, "release_req")
    with pytest.raises(hook_check.HookNotLive, match="release_req is no Python function"):
        hook_check.check_scheduler()


def test_checking_the_server_imports_nothing_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(live, "problem_of", lambda call, _site: checked.append(call.module))
    hook_check.check_server()
    assert sorted(set(checked)) == [
        "sglang",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.tokenizer_manager",
    ]


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """The installed, patched SGLang once more, where PYTHONPATH finds it first."""
    installed = metadata.distribution("sglang")
    for name in ("sglang", f"sglang-{installed.version}.dist-info", ".sglang-trace-patches-sglang"):
        shutil.copytree(installed.locate_file(name), tmp_path / name, copy_function=os.symlink)
    return tmp_path


@pytest.mark.parametrize("process", ["server", "scheduler"])
def test_the_copy_that_python_imports_is_the_one_that_is_checked(
    overlay: Path, process: str
) -> None:
    """Its file without the hook is refused, although the installed one is patched."""
    file = overlay / "sglang/__init__.py"
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("_trace_hooks.on_import()", ""))
    run = subprocess.run(
        [sys.executable, "-c", CHECK.format(process)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(overlay), str(ROOT)))},
        cwd=overlay,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    error = run.stderr.strip().splitlines()[-1]
    assert f"HookNotLive: {file} was edited by someone else" in error
    assert "`python -m patches apply sglang`" in error
