"""Every hook of the series is called by the Megatron-core that a rank imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from inspect import getmembers, isfunction
from pathlib import Path

import pytest

from megatron_trace import hooks
from megatron_trace.preflight.hook_check import UnpatchedMegatron, require_live_hooks
from patches.check.sites import hook_sites
from patches.config import select_target

ROOT = Path(__file__).parents[3]
LAUNCHER = "megatron_trace.launch"


def test_every_hook_of_the_door_is_live(one_rank: None) -> None:
    require_live_hooks()
    called = {call.hook for call in hook_sites(select_target("megatron-core"))}
    door = {name for name, f in getmembers(hooks, isfunction) if f.__module__ == hooks.__name__}
    assert called == door


def test_a_replaced_function_is_named(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.attention import Attention

    monkeypatch.setattr(Attention, "forward", lambda self, *args: args)
    with pytest.raises(UnpatchedMegatron, match=r"Attention\.forward .* our hook key_value"):
        require_live_hooks()


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """The installed, patched Megatron-core once more, where PYTHONPATH finds it first."""
    installed = metadata.distribution("megatron-core")
    info = f"megatron_core-{installed.version}.dist-info"
    for name in ("megatron", info, ".sglang-trace-patches-megatron-core"):
        shutil.copytree(installed.locate_file(name), tmp_path / name, copy_function=os.symlink)
    return tmp_path


@pytest.mark.parametrize("program", ["megatron_trace.rank", LAUNCHER])
def test_a_copy_with_an_unpatched_file_is_refused(overlay: Path, program: str) -> None:
    file = overlay / "megatron/core/transformer/mlp.py"
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    file.write_text("".join(line for line in lines if "trace_hooks.expert_activation" not in line))
    script = overlay / "script.py"
    script.write_text("print('trained')\n")
    run = subprocess.run(
        [sys.executable, "-m", program, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(overlay), str(ROOT)))},
        cwd=overlay,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "trained" not in run.stdout
    error = run.stderr.strip().splitlines()[-1]
    assert f"{file} was edited by someone else" in error
    assert "`python -m patches apply megatron-core`" in error
