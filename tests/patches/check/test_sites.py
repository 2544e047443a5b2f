"""Which functions must call which hook is read from the patched text of what Python imports."""

import ast
import importlib
import inspect
import re
import shutil
from pathlib import Path

import pytest

from patches.apply import edit
from patches.apply.imported import imported_from
from patches.apply.installed import find_installed
from patches.apply.state import require_upstream
from patches.apply.tree import Checkout
from patches.check.sites import CallSite, call_sites, hook_sites
from patches.config import Target, load_targets
from patches.errors import PatchError
from patches.format.series import load_series

ENGINE = "demo/core/engine.py"
RELEASED = b"class Engine:\n    def run(self):\n        return 1\n"
PATCHED = b"class Engine:\n    def run(self):\n        return trace_hooks.first(1)\n"


@pytest.fixture
def demo(world, unified, patch_file):
    """A package whose one patch adds one call of a hook."""
    for file in world.series_dir.iterdir():
        file.unlink()
    world.released[ENGINE] = RELEASED
    shutil.rmtree(world.site)
    world.install()
    patch = patch_file("all", unified(ENGINE, RELEASED, PATCHED), hooks="first")
    world.write_series(all=patch)
    return world


def test_the_sites_are_those_of_the_patched_text(demo):
    edit.apply(demo.target, demo.site)
    assert hook_sites(demo.target, demo.site) == [CallSite(ENGINE, "Engine.run", "first")]
    assert hook_sites(demo.target, demo.site, lambda hook: hook != "first") == []


def test_an_unpatched_package_has_no_sites_but_a_command(demo):
    with pytest.raises(PatchError, match="run `python -m patches apply demo`"):
        hook_sites(demo.target, demo.site)


def test_an_edited_file_has_no_sites_but_a_way_out(demo):
    edit.apply(demo.target, demo.site)
    (demo.site / ENGINE).write_text("trace_hooks.first()\n")
    with pytest.raises(PatchError, match=r"engine\.py was edited by someone else"):
        hook_sites(demo.target, demo.site)


def test_what_comes_first_on_the_path_is_what_would_be_imported(demo, tmp_path, monkeypatch):
    assert imported_from(demo.target) is None
    monkeypatch.syspath_prepend(demo.site)
    assert imported_from(demo.target) == demo.site
    tree = tmp_path / "tree"
    shutil.copytree(demo.site / "demo", tree / "demo")
    monkeypatch.syspath_prepend(tree)
    assert imported_from(demo.target) == Checkout(tree)
    edit.apply(demo.target, demo.site)
    with pytest.raises(PatchError, match=f"--tree {tree}"):
        hook_sites(demo.target)


def test_calls_are_found_at_module_level_in_methods_and_in_inner_functions():
    text = (
        b"trace_hooks.a()\nother.a()\nclass C:\n  x = trace_hooks.b()\n"
        b"  def m(self):\n    if self:\n     def inner():\n      trace_hooks.c(trace_hooks.a())\n"
        b"    return inner\nasync def f(y=trace_hooks.d()): trace_hooks.e()\n"
        b"@f(\n  trace_hooks.a()\n)\ndef g(): pass\n"
    )
    found = call_sites({"demo/m.py": text}, ("a", "b", "c", "d"))
    assert [(call.function, call.hook) for call in found] == [
        ("", "a"), ("C", "b"), ("C.m", "a"), ("C.m", "c"), ("f", "d"), ("g", "a"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "module"), [("a/b.py", "a.b"), ("a/__init__.py", "a"), ("a/b/__init__.py", "a.b")]
)
def test_the_module_of_a_file(path, module):
    assert CallSite(path, "", "hook").module == module


# --- the real upstreams

HOOK_CALL = re.compile(r"\b\w*hooks\.(\w+)\(((?:[^()]|\([^()]*\))*)\)")
INSTALLED = [target for target in load_targets().values() if find_installed(target) is not None]


@pytest.mark.parametrize("target", INSTALLED, ids=lambda target: target.name)
def test_no_call_of_a_hook_in_a_real_file_is_passed_over(target: Target):
    upstream = require_upstream(target)
    series = load_series(target, upstream.version)
    calls = 0
    for path in series.paths:
        for node in ast.walk(ast.parse(upstream.current(path) or b"")):
            door = getattr(getattr(node, "func", None), "value", None)
            calls += isinstance(door, ast.Name) and door.id.endswith("trace_hooks")
    sites = hook_sites(target)
    assert calls == len(sites) > 0
    assert {call.hook for call in sites} == set(series.hooks)


@pytest.mark.parametrize("target", load_targets().values(), ids=lambda target: target.name)
def test_every_call_in_every_series_fits_the_function_of_the_door(target: Target):
    door = importlib.import_module(".".join(Path(target.hooks).with_suffix("").parts))
    for version in target.versions():
        for patch in load_series(target, version).patches:
            added = b"".join(line for d in patch.diffs for h in d.hunks for line in h.added)
            calls = HOOK_CALL.findall(added.decode())
            assert {hook for hook, _ in calls} == set(patch.hooks), patch.name
            for hook, arguments in calls:
                call = ast.parse(f"{hook}({arguments})", mode="eval").body
                assert isinstance(call, ast.Call)
                named = {str(each.arg): each.value for each in call.keywords}
                inspect.signature(getattr(door, hook)).bind(*call.args, **named)
