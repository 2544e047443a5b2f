"""The git tree that a series is rebased in.

It has the old release, on it one commit a patch (branch ``old``), and the new release, on which
the patches are picked (branch ``new``). Both releases are tagged. Only Python files are in it.
"""

from pathlib import Path

from patches import release
from patches.config import Release, Target
from patches.git import git, git_lines
from patches.hashes import sha256
from patches.series_files import series_files

OLD, BASE = "old-release", "base"


def make_tree(target: Target, source: str, version: str, tree: Path, downloads: Path) -> Release:
    """Make the tree from the releases ``source``, with its series, and ``version``; return that."""
    files = [str(file.resolve()) for file in series_files(target, source).values()]
    tree.mkdir(parents=True)
    git(tree, "init", "--quiet", "--initial-branch=old")
    git(tree, "config", "gc.auto", "0")
    _commit_release(target, source, tree, downloads / source)
    git(tree, "tag", OLD)
    git(tree, "am", "--quiet", "--keep-cr", *files)
    git(tree, "checkout", "--quiet", "-b", "new", OLD)
    archive = _commit_release(target, version, tree, downloads / version)
    git(tree, "tag", BASE)
    return Release(archive.name, sha256(archive.read_bytes()))


def patch_commits(tree: Path) -> list[str]:
    """The commits of the old series, in order."""
    return git_lines(tree, "rev-list", "--reverse", f"{OLD}..old")


def _commit_release(target: Target, version: str, tree: Path, downloads: Path) -> Path:
    """Make the files of a release all that is in the tree; return the downloaded file."""
    archive = release.download(target, version, downloads)
    git(tree, "rm", "-r", "--quiet", "--ignore-unmatch", ".")
    for path, content in release.python_files(archive, target.package):
        file = tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    git(tree, "add", "--all", "--force")
    message = f"{target.distribution} {version} as released"
    git(tree, "commit", "--quiet", "--allow-empty", "--message", message)
    return archive
