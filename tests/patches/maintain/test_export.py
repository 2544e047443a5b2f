import os
import shutil
import subprocess

import pytest

from patches.errors import PatchError
from patches.format.series import load_series
from patches.maintain.export import export_series

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="export needs git")
MESSAGE = """engine: report every line

Why here.

Reason: a test
Forwarded: not-needed
Remove-when: the test is gone
Group: hooks
Hooks: none
"""


@pytest.fixture
def git(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    who = {
        f"GIT_{role}_{key}": "a@b.c"
        for role in ("AUTHOR", "COMMITTER")
        for key in ("NAME", "EMAIL")
    }

    def run(*arguments: str, text: str = "") -> None:
        subprocess.run(
            ["git", "-C", str(tree), *arguments],
            input=text.encode(),
            env={**os.environ, **who},
            capture_output=True,
            check=True,
        )

    run.tree = tree
    run("init")
    return run


def commit_release(git, world):
    for path, content in world.released.items():
        (git.tree / path).parent.mkdir(parents=True, exist_ok=True)
        (git.tree / path).write_bytes(content)
    git("add", "--all")
    git("commit", "--message", "released")
    git("tag", "base")


def test_commits_become_a_series_that_applies(git, world):
    commit_release(git, world)
    for path, content in world.patched.items():
        (git.tree / path).parent.mkdir(exist_ok=True)
        (git.tree / path).write_bytes(content)
    git("add", "--all")
    git("commit", "--file", "-", text=MESSAGE)
    series = export_series(world.target, "1.2.0", git.tree, "base")
    assert [patch.name for patch in series.patches] == ["engine-report-every-line.patch"]
    assert sorted(p.name for p in world.series_dir.glob("*")) == [series.patches[0].name, "series"]
    pristine = {path: world.released.get(path) for path in series.paths}
    assert series.results(pristine) == world.patched


def test_import_and_export_give_the_same_bytes_whatever_git_is_configured_to_do(git, world):
    commit_release(git, world)
    for number in range(2):
        (git.tree / "demo/core/other.py").write_bytes(b"edit %d\n" % number)
        git("commit", "--all", "--file", "-", text=MESSAGE.replace("every", f"every {number}"))
    first = export_series(world.target, "1.2.0", git.tree, "base")
    exported = {p.name: p.read_bytes() for p in world.series_dir.iterdir()}
    git("config", "diff.noprefix", "true")
    git("config", "diff.context", "1")
    git("config", "format.signOff", "true")
    git("config", "format.subjectPrefix", "OTHER")
    git("reset", "--hard", "base")
    git("am", "--keep-cr", *(str(world.series_dir / patch.name) for patch in first.patches))
    assert export_series(world.target, "1.2.0", git.tree, "base") == first
    assert {p.name: p.read_bytes() for p in world.series_dir.iterdir()} == exported


def test_a_commit_that_is_no_patch_of_ours_writes_nothing(git, world):
    commit_release(git, world)
    (git.tree / "demo/core/other.py").write_bytes(b"edited\n")
    git("commit", "--all", "--message", "no trailers")
    before = load_series(world.target, "1.2.0")
    with pytest.raises(PatchError, match="lacks Reason"):
        export_series(world.target, "1.2.0", git.tree, "base")
    assert load_series(world.target, "1.2.0") == before


def test_a_tree_without_new_commits_and_a_missing_tree_are_refused(git, world, tmp_path):
    commit_release(git, world)
    with pytest.raises(PatchError, match="needs commits after base"):
        export_series(world.target, "1.2.0", git.tree, "base")
    with pytest.raises(PatchError, match="git says: "):
        export_series(world.target, "1.2.0", tmp_path / "nowhere", "base")
