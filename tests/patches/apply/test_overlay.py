"""Without --site and --tree the commands work on the copy that Python would import."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patches import PatchError, verify_target
from patches.apply import edit
from patches.apply.report import report
from patches.apply.state import State
from patches.config import ROOT, load_targets
from patches.format.series import load_series


@pytest.fixture
def site(world, monkeypatch) -> Path:
    """The world's site-packages is on the path."""
    monkeypatch.syspath_prepend(world.site)
    return world.site


@pytest.fixture
def overlay(world, make_world, tmp_path, site, monkeypatch) -> Path:
    """Another copy of the same release, earlier on the path."""
    other = make_world(tmp_path / "other")
    monkeypatch.syspath_prepend(other.site)
    return other.site


def test_the_copy_that_is_earlier_on_the_path_is_patched_and_verified(world, overlay):
    before = world.tree()
    assert report(world.target).site == str(overlay)
    assert edit.apply(world.target)
    verify_target("demo", root=world.root)
    assert report(world.target, overlay).state == State.PATCHED
    assert world.tree() == before
    assert edit.revert(world.target)
    with pytest.raises(PatchError, match="is not patched"):
        verify_target("demo", root=world.root)


def test_an_overlay_with_another_version_hides_a_patched_installation(world, overlay):
    edit.apply(world.target, world.site)
    info = next(overlay.glob("*.dist-info"))
    (info / "METADATA").write_text("Name: demo\nVersion: 1.3.0\n")
    info.rename(overlay / "demo-1.3.0.dist-info")
    with pytest.raises(PatchError, match=rf"demo 1\.3\.0 is installed in {overlay} but there are"):
        verify_target("demo", root=world.root)


def test_metadata_without_the_package_hides_nothing(world, overlay):
    shutil.rmtree(overlay / "demo")
    assert report(world.target).site == str(world.site)


def test_a_source_tree_on_the_path_is_what_python_imports(world, overlay):
    shutil.rmtree(next(overlay.glob("*.dist-info")))
    before = world.tree()
    with pytest.raises(PatchError, match=rf"`python -m patches apply demo --tree {overlay}`"):
        verify_target("demo", root=world.root)
    assert edit.apply(world.target)
    verify_target("demo", root=world.root)
    assert report(world.target, overlay.parent / "nothing").state == State.NOT_INSTALLED
    assert world.tree() == before


def test_two_versions_in_one_directory_are_refused(world, site):
    shutil.copytree(next(site.glob("*.dist-info")), site / "demo-1.1.0.dist-info")
    (site / "demo-1.1.0.dist-info/METADATA").write_text("Name: demo\nVersion: 1.1.0\n")
    with pytest.raises(PatchError, match=r"more than one version \(1\.1\.0, 1\.2\.0\): remove"):
        verify_target("demo", root=world.root)


def test_a_release_that_pip_put_on_the_path_is_the_one_that_the_commands_see(
    released, make_wheel, read_wheel, tmp_path
):
    """As `make matrix` does it, with the real text of a release and the real command line."""
    target = load_targets()["megatron-core"]
    version = target.versions()[0]
    paths = [*load_series(target, version).paths, "megatron/core/__init__.py"]
    files = read_wheel(released(target, version), paths)
    wheel = make_wheel(tmp_path, "megatron_core", version, files)
    overlay = tmp_path / "overlay"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", str(overlay), str(wheel)], check=True)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "patches", *arguments]
        path = {"PYTHONPATH": str(overlay), "PYTHONDONTWRITEBYTECODE": "1"}
        found = subprocess.run(
            command, cwd=ROOT.parent, env={**os.environ, **path}, capture_output=True, text=True
        )
        return found.stdout + found.stderr

    def files_now() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in overlay.rglob("*") if p.is_file()}

    before = files_now()
    (found,) = json.loads(run("status", target.name, "--json"))
    assert (found["installed"], found["site"]) == (version, str(overlay))
    assert run("apply", target.name) == f"{target.name} patched in {overlay}\n"
    assert f"{target.name} {version} is patched" in run("verify", target.name)
    assert run("revert", target.name) == f"{target.name} reverted in {overlay}\n"
    assert files_now() == before
