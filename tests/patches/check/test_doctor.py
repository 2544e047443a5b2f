"""The doctor imports the patched package in a process of its own and looks at its code."""

import json
import py_compile
import shutil
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from patches import cli
from patches.apply import edit
from patches.check import live
from patches.check.sites import CallSite
from patches.config import ROOT, load_targets, select_target

INIT, ENGINE = "demo/core/__init__.py", "demo/core/engine.py"
DOOR = "import types\ndoor_hooks = types.SimpleNamespace(on_load=print, on_run=print)\n"
RELEASED = {
    INIT: "",
    ENGINE: "import functools\n\n\ndef logged(f):\n    @functools.wraps(f)\n"
    "    def call(*a):\n        return f(*a)\n\n    return call\n\n\n"
    "class Engine:\n    @logged\n    def run(self):\n        return 1\n",
}
PATCHED = {
    INIT: DOOR + "door_hooks.on_load()\n",
    ENGINE: "from demo.core import door_hooks\n"
    + RELEASED[ENGINE].replace("return 1", "return [door_hooks.on_run(x) for x in (1, 2)]"),
}


@pytest.fixture
def doctor(world, unified, patch_file, monkeypatch, tmp_path):
    for file in world.series_dir.iterdir():
        file.unlink()
    world.released = {path: text.encode() for path, text in RELEASED.items()}
    shutil.rmtree(world.site)
    world.install()
    diffs = [unified(path, RELEASED[path].encode(), PATCHED[path].encode()) for path in RELEASED]
    world.write_series(all=patch_file("all", *diffs, hooks="on_load, on_run"))
    monkeypatch.setattr(cli, "load_targets", partial(load_targets, world.root))
    monkeypatch.setattr(cli, "select_target", partial(select_target, root=world.root))
    monkeypatch.setenv("PYTHONPATH", str(ROOT.parent))
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.app, ["doctor", "--site", str(world.site), *arguments])

    return invoke


def problems(result: Result) -> dict[str, str]:
    (found,) = json.loads(result.stdout)
    return {hook["hook"]: hook["problem"] for hook in found["hooks"]}


def test_live_hooks_are_listed_and_the_exit_code_is_0(doctor, world):
    edit.apply(world.target, world.site)
    result = doctor()
    assert result.exit_code == 0, result.output
    assert f"live  on_load  {INIT}: module level" in result.stdout
    assert f"live  on_run  {ENGINE}: Engine.run" in result.stdout
    assert problems(doctor("--json")) == {"on_load": "", "on_run": ""}


def test_an_unpatched_package_is_not_imported_and_fails_with_the_command(doctor):
    result = doctor()
    assert result.exit_code == 1
    assert "run `python -m patches apply demo`" in result.stdout
    assert "on_run" not in result.stdout


def test_stale_byte_code_that_python_trusts_is_found(doctor, world):
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(world.site / ENGINE), invalidation_mode=unchecked, doraise=True)
    edit.apply(world.target, world.site)
    result = doctor("--json")
    assert result.exit_code == 1
    assert problems(result) == {"on_load": "", "on_run": "on_run is not called"}


def test_a_copy_earlier_on_the_path_is_found(doctor, world, tmp_path):
    edit.apply(world.target, world.site)
    shutil.copytree(world.site / "demo", tmp_path / "demo")
    result = doctor()
    assert result.exit_code == 1
    assert f"demo.core.engine is imported from {tmp_path / ENGINE}" in result.stdout
    assert "remove other copies from the path" in result.stdout


def contract(world, text: str) -> None:
    """What the hooks' side uses of the package, in its module for that."""
    imports = (
        "from patches.check.attributes import Attributes\n"
        "from patches.check.signatures import Call\n"
    )
    preflight = world.root.parent / "preflight"
    preflight.mkdir(exist_ok=True)
    (preflight / "upstream_api.py").write_text(f"{imports}USES = ({text},)\n")


def test_what_our_code_uses_of_the_package_is_checked(doctor, world):
    edit.apply(world.target, world.site)
    contract(world, "Call('demo.core.engine:Engine.run(self)')")
    assert "as our code needs it: 1 " in doctor().stdout
    contract(world, "Attributes('demo.core.engine:Engine', ('runs',), since='1.2')")
    result = doctor()
    assert result.exit_code == 1
    assert "UNLIKE  we use runs of demo.core.engine:Engine" in result.stdout
    assert "live  on_run" in result.stdout
    contract(world, "Attributes('demo.core.engine:Engine', ('runs',), since='1.3')")
    assert doctor().exit_code == 0


@pytest.mark.parametrize("statement", ["raise OSError('no driver')", "import os; os._exit(3)"])
def test_a_package_that_cannot_be_imported_is_said(doctor, world, statement):
    edit.apply(world.target, world.site)
    top = world.site / "demo" / "__init__.py"
    top.write_text(statement)
    found = problems(doctor("--json"))
    assert set(found) == {"on_load", "on_run"}
    words = "importing failed: 3" if "exit" in statement else "cannot be imported: OSError: no dri"
    assert all(words in problem for problem in found.values())


def test_the_combination_is_told_from_the_configuration(doctor, world):
    config = json.loads((world.root / "config.json").read_text())
    tested = [{"python": "2.7", "torch": "0.1"}]
    config["demo"]["releases"]["1.2.0"] = {"file": "demo.whl", "sha256": "0", "tested": tested}
    (world.root / "config.json").write_text(json.dumps(config))
    (found,) = json.loads(doctor("--json").stdout)
    assert (found["tested"], found["combination_tested"]) == (tested, False)
    assert ": not tested with this release" in doctor().stdout


@pytest.mark.parametrize("target", load_targets().values(), ids=lambda target: target.name)
def test_every_series_says_which_file_it_was_made_for(target):
    assert set(target.releases) == set(target.versions())
    for release in target.releases.values():
        assert Path(release.file).suffix in (".whl", ".gz")
        assert len(release.sha256) == 64


def test_a_class_that_needs_something_optional_is_absent_and_not_dead(tmp_path, monkeypatch):
    (tmp_path / "optional_engine.py").write_text("Engine = None\n\n\nclass Other: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    call = partial(CallSite, "optional_engine.py", hook="on_run")
    absent, dead = call(function="Engine.run"), call(function="Other.run")
    assert live.problem_of(absent, tmp_path) == ""
    assert live.is_left_out(absent)
    assert "no Python function" in live.problem_of(dead, tmp_path)
    assert not live.is_left_out(dead)


@pytest.mark.parametrize("target", load_targets(ROOT).values(), ids=lambda target: target.name)
def test_every_real_target_says_what_our_code_uses_of_it(target):
    assert (ROOT.parent / target.hooks).parent.joinpath("preflight/upstream_api.py").is_file()
