"""Every hook of the series is called by the SGLang that a process imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from patches import live
from patches.config import select_target
from patches.sites import hook_sites
from sglang_trace import liveness

ROOT = Path(__file__).parents[2]


def test_the_installed_sglang_calls_every_hook() -> None:
    liveness.check_scheduler()
    liveness.check_server()


def test_every_hook_of_the_series_is_checked_in_some_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: set[str] = set()
    hooks = {call.hook for call in hook_sites(select_target("sglang"))}
    monkeypatch.setattr(
        liveness, "require_live_hooks", lambda _name, wanted: checked.update(filter(wanted, hooks))
    )
    liveness.check_scheduler()
    in_scheduler = set(checked)
    liveness.check_server()
    assert checked == hooks
    assert checked - in_scheduler == set(liveness.SERVER_HOOKS)


def test_a_function_that_lost_its_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "forward", lambda self, batch: batch)
    with pytest.raises(
        liveness.HookNotLive,
        match=r"ModelRunner\.forward does not call our hook on_forward.*patches apply sglang",
    ):
        liveness.check_scheduler()


def test_a_function_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import schedule_batch

    monkeypatch.delattr(schedule_batch, "release_req")
    with pytest.raises(liveness.HookNotLive, match="release_req is no Python function"):
        liveness.check_scheduler()


def test_checking_the_server_imports_nothing_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(live, "problem_of", lambda call, _site: checked.append(call.module))
    liveness.check_server()
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
        [sys.executable, "-c", f"from sglang_trace import liveness; liveness.check_{process}()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(overlay), str(ROOT)))},
        cwd=overlay,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    error = run.stderr.strip().splitlines()[-1]
    assert f"HookNotLive: {file} was edited by someone else" in error
    assert "`python -m patches apply sglang`" in error
