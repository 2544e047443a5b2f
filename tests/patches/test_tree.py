"""Source trees: git checkouts and unpacked releases, without RECORD and without git."""

import shutil
import subprocess
from pathlib import Path

import pytest

from patches import PatchError, edit, verify_target
from patches.report import report
from patches.state import State
from patches.tree import Checkout

ENGINE = "demo/core/engine.py"
VERSION = "demo/core/version.py"


@pytest.fixture(params=[".", "python"])
def clone(world, tmp_path, request) -> Path:
    """The released files in a tree, at its root or below ``python/``, and no dist-info."""
    site = tmp_path / "clone" / request.param
    for path, content in world.released.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    return tmp_path / "clone"


@pytest.fixture
def site(clone) -> Path:
    """Where the package lies in the clone."""
    return next(clone.rglob(VERSION)).parents[2]


def files(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def state_of(world, clone, version=None):
    return State(report(world.target, Checkout(clone, version)).state)


def verify(world, clone, version=None):
    verify_target("demo", site=Checkout(clone, version), root=world.root)


def test_apply_patches_a_tree_and_revert_restores_it(world, clone, site):
    before = files(clone)
    assert state_of(world, clone) is State.PRISTINE
    assert edit.apply(world.target, Checkout(clone))
    assert not edit.apply(world.target, Checkout(clone))
    verify(world, clone)
    assert {path: (site / path).read_bytes() for path in world.patched} == world.patched
    assert edit.revert(world.target, Checkout(clone))
    assert files(clone) == before


def test_the_installed_package_is_left_alone(world, clone):
    before = world.tree()
    edit.apply(world.target, Checkout(clone))
    assert world.tree() == before


def test_the_remedies_lead_back_to_the_tree(world, clone):
    with pytest.raises(PatchError, match=rf"run `python -m patches apply demo --tree {clone}`"):
        verify(world, clone)
    with pytest.raises(PatchError, match=rf"--tree {clone} --version 1\.2\.0`"):
        verify(world, clone, "1.2.0")


@pytest.mark.parametrize("patched_before", [False, True])
def test_foreign_edits_are_named_and_never_overwritten(world, clone, site, patched_before):
    if patched_before:
        edit.apply(world.target, Checkout(clone))
    (site / ENGINE).write_bytes(b"mine\n")
    before = files(clone)
    acts = [edit.apply, edit.revert] if patched_before else [edit.apply]
    for act in acts:
        with pytest.raises(PatchError, match=r"engine\.py was edited by someone else.* checkout"):
            act(world.target, Checkout(clone))
    assert files(clone) == before


def test_an_edit_of_a_file_that_is_not_patched_is_the_users_own_affair(world, clone, site):
    (site / "demo/core/other.py").write_bytes(b"mine\n")
    assert edit.apply(world.target, Checkout(clone))
    verify(world, clone)
    assert edit.revert(world.target, Checkout(clone))
    assert (site / "demo/core/other.py").read_bytes() == b"mine\n"


def test_a_release_checked_out_over_a_patched_one_is_cleaned_of_what_we_added(world, clone, site):
    edit.apply(world.target, Checkout(clone))
    (site / VERSION).write_bytes(b'__version__ = "1.3.0"\n')
    (site / ENGINE).write_bytes(b"rewritten\n")
    assert state_of(world, clone) is State.UNSUPPORTED
    edit.revert(world.target, Checkout(clone))
    assert (site / ENGINE).read_bytes() == b"rewritten\n"
    assert not list(clone.rglob(".sglang-trace-patches-*"))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (b"__version__ = version = '1.2.0'\n", "1.2.0"),
        (
            b'MAJOR = 1\nMINOR = 2\nPATCH = 0\nPRE_RELEASE = ""\n'
            b"__version__ = '.'.join(map(str, VERSION[:3])) + ''.join(VERSION[3:])\n",
            "1.2.0",
        ),
        (b"MAJOR = 1\nMINOR = 3\nPATCH = 0\nPRE_RELEASE = 'rc1'\n", "1.3.0rc1"),
    ],
)
def test_the_version_is_read_from_the_tree(world, clone, site, text, version):
    (site / VERSION).write_bytes(text)
    assert report(world.target, Checkout(clone)).installed == version


def test_a_version_that_cannot_be_read_must_be_given_once(world, clone, site):
    (site / VERSION).write_bytes(b'try:\n    pass\nexcept ImportError:\n    __version__ = "0.0"\n')
    with pytest.raises(PatchError, match=r"add --version with one of 1\.2\.0"):
        edit.apply(world.target, Checkout(clone))
    edit.apply(world.target, Checkout(clone, "1.2.0"))
    verify(world, clone)
    assert edit.revert(world.target, Checkout(clone))


def test_a_directory_without_the_package_is_refused(world, tmp_path):
    with pytest.raises(PatchError, match=r"has no demo/core/: point --tree at the root"):
        edit.apply(world.target, Checkout(tmp_path / "world"))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_clean_does_not_take_away_what_revert_needs(world, clone):
    before = files(clone)
    git = ["git", "-C", str(clone)]
    subprocess.run([*git, "init"], check=True, capture_output=True)
    edit.apply(world.target, Checkout(clone))
    subprocess.run([*git, "add", "."], check=True, capture_output=True)
    subprocess.run([*git, "clean", "-fd"], check=True, capture_output=True)
    shutil.rmtree(clone / ".git")
    edit.revert(world.target, Checkout(clone))
    assert files(clone) == before
