"""Source trees: git checkouts and unpacked releases, without RECORD and without git."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from patches import PatchError, verify_target
from patches.apply import edit
from patches.apply.report import report
from patches.apply.state import State
from patches.apply.tree import Checkout
from patches.maintain.export import export_series

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
        with pytest.raises(PatchError, match=r"engine\.py is not as in demo 1\.2\.0: .* cat-file"):
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


SILENT = b'try:\n    pass\nexcept ImportError:\n    __version__ = "0.0"\n'


def test_a_tree_that_does_not_say_its_version_is_known_by_its_files(world, clone, site):
    (site / VERSION).write_bytes(SILENT)
    before = files(clone)
    assert report(world.target, Checkout(clone)).installed == "1.2.0"
    edit.apply(world.target, Checkout(clone))
    verify(world, clone)
    assert edit.revert(world.target, Checkout(clone))
    assert files(clone) == before


def test_a_tree_that_neither_says_its_version_nor_fits_is_refused(world, clone, site):
    (site / VERSION).write_bytes(SILENT)
    (site / ENGINE).write_bytes(b"rewritten\n")
    with pytest.raises(PatchError, match=r"add --version with one of 1\.2\.0"):
        edit.apply(world.target, Checkout(clone))


def test_a_tree_that_fits_two_series_must_be_told_which(world, clone, site):
    (site / VERSION).write_bytes(SILENT)
    shutil.copytree(world.series_dir, world.root / "demo/1.4.0")
    with pytest.raises(PatchError, match=r"add --version with one of 1\.2\.0, 1\.4\.0"):
        edit.apply(world.target, Checkout(clone))
    assert edit.apply(world.target, Checkout(clone, "1.4.0"))
    assert report(world.target, Checkout(clone)).installed == "1.4.0"


def test_a_commit_between_releases_is_taken_for_the_one_it_fits_only_when_told(world, clone, site):
    (site / VERSION).write_bytes(b'__version__ = "1.1.9.dev3"\n')
    before = files(clone)
    assert state_of(world, clone) is State.UNSUPPORTED
    with pytest.raises(PatchError, match=r"only for 1\.2\.0: add `--version 1\.2\.0`, because the"):
        edit.apply(world.target, Checkout(clone))
    assert edit.apply(world.target, Checkout(clone, "1.2.0"))
    # From now on the tree itself remembers.
    verify(world, clone)
    assert report(world.target, Checkout(clone)).installed == "1.2.0"
    assert edit.revert(world.target, Checkout(clone))
    assert files(clone) == before


def test_a_commit_that_does_not_fit_is_refused_for_good(world, clone, site):
    (site / VERSION).write_bytes(b'__version__ = "1.1.9.dev3"\n')
    (site / ENGINE).write_bytes(b"rewritten\n")
    with pytest.raises(PatchError, match=r"only for 1\.2\.0: check out version 1\.2\.0, then"):
        edit.apply(world.target, Checkout(clone))
    with pytest.raises(
        PatchError, match=r"engine\.py is not as in demo 1\.2\.0: .* commit of that"
    ):
        edit.apply(world.target, Checkout(clone, "1.2.0"))


@pytest.mark.parametrize("version", ["1.3.0", None])
def test_revert_never_forgets_a_patched_file_whatever_version_the_tree_has_now(
    world, clone, site, version
):
    before = files(clone)
    edit.apply(world.target, Checkout(clone))
    (site / VERSION).write_bytes(b'__version__ = "1.3.0"\n')
    assert edit.revert(world.target, Checkout(clone, version))
    (site / VERSION).write_bytes(world.released[VERSION])
    assert files(clone) == before


def test_a_directory_without_the_package_is_refused(world, tmp_path):
    with pytest.raises(PatchError, match=r"has no demo/core/: point --tree at the root"):
        edit.apply(world.target, Checkout(tmp_path / "world"))


ME = {f"GIT_{r}_{k}": "a@b.c" for r in ("AUTHOR", "COMMITTER") for k in ("NAME", "EMAIL")}
EXPORTED = """engine: report every line

Why here.

Reason: a test
Forwarded: not-needed
Remove-when: the test is gone
Group: hooks
Hooks: none
"""


@pytest.fixture
def git(clone):
    """Git in the clone, which becomes a repository with one commit."""
    if shutil.which("git") is None:
        pytest.skip("needs git")

    def run(*arguments: str, text: str = "") -> str:
        command = ["git", "-C", str(clone), *arguments]
        environment = {**os.environ, **ME, "GIT_CONFIG_GLOBAL": os.devnull}
        found = subprocess.run(
            command, input=text, check=True, capture_output=True, text=True, env=environment
        )
        return found.stdout

    run("init")
    run("add", "--all")
    run("commit", "--message", "released")
    return run


def edited(git, site) -> set[str]:
    """What `git status` calls changed, relative to the package's parent."""
    lines = git("status", "--porcelain", "--untracked-files=all").splitlines()
    top = Path(git("rev-parse", "--show-toplevel").strip())
    return {str((top / line[3:]).relative_to(site.resolve())) for line in lines}


def test_git_sees_the_edited_files_alone_and_nothing_after_a_revert(world, clone, site, git):
    assert edit.apply(world.target, Checkout(clone))
    assert edited(git, site) == set(world.patched)
    assert edit.revert(world.target, Checkout(clone))
    assert edited(git, site) == set()
    assert edit.apply(world.target, Checkout(clone))
    verify(world, clone)


def test_a_dirty_tree_is_patched_and_reverted_around_the_users_edits(world, clone, site, git):
    (site / "demo/core/other.py").write_bytes(b"mine\n")
    (site / "demo/core/mine.py").write_bytes(b"mine\n")
    mine = {"demo/core/other.py", "demo/core/mine.py"}
    edit.apply(world.target, Checkout(clone))
    assert edited(git, site) == {*world.patched, *mine}
    edit.revert(world.target, Checkout(clone))
    assert edited(git, site) == mine


@pytest.mark.parametrize("committed", [False, True])
def test_the_command_for_a_file_that_differs_brings_it_back(world, clone, site, git, committed):
    (site / ENGINE).write_bytes(b"mine\n")
    if committed:
        git("commit", "--all", "--message", "mine")
    with pytest.raises(PatchError) as refused:
        edit.apply(world.target, Checkout(clone))
    command = re.search(r"`(git .* cat-file blob [0-9a-f]{40} > [^`]+)`", str(refused.value))
    assert command is not None
    subprocess.run(command[1], shell=True, check=True)
    assert edit.apply(world.target, Checkout(clone))
    verify(world, clone)


def test_git_clean_does_not_take_away_what_revert_needs(world, clone, site, git):
    edit.apply(world.target, Checkout(clone))
    git("add", ".")
    git("clean", "-fd")
    git("reset")
    edit.revert(world.target, Checkout(clone))
    assert edited(git, site) == set()


@pytest.mark.parametrize("away", [("stash", "--include-untracked"), ("checkout", "--", ".")])
def test_a_patched_tree_that_git_has_put_back_is_pristine_and_can_be_patched_again(
    world, clone, site, git, away
):
    edit.apply(world.target, Checkout(clone))
    git(*away)
    assert state_of(world, clone) in (State.PRISTINE, State.INTERRUPTED)
    assert edit.apply(world.target, Checkout(clone))
    verify(world, clone)
    assert edit.revert(world.target, Checkout(clone))
    assert edited(git, site) == set()


def test_a_branch_with_another_version_is_told_from_the_patched_one(world, clone, site, git):
    git("checkout", "-b", "next")
    (site / VERSION).write_bytes(b'__version__ = "1.3.0"\n')
    git("commit", "--all", "--message", "1.3.0")
    git("checkout", "-")
    edit.apply(world.target, Checkout(clone))
    git("checkout", "next")  # git carries our edits along: no file of theirs differs
    assert state_of(world, clone) is State.UNSUPPORTED
    assert edit.revert(world.target, Checkout(clone))
    assert edited(git, site) == set()


def test_commits_of_a_clone_are_exported_wherever_the_package_lies(world, clone, site, git):
    for path, content in world.patched.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_bytes(content)
    git("add", "--all")
    git("commit", "--file", "-", text=EXPORTED)
    copy = replace(world.target, series_dir=world.root / "exported")
    series = export_series(copy, "1.2.0", site, "HEAD~1")
    assert series.results({p: world.released.get(p) for p in series.paths}) == world.patched
