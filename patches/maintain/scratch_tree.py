"""The git tree that a series is rebased in.

It has the old release, on it one commit a patch (branch ``old``), and the new release, on which
the patches are picked (branch ``new``). Both releases are tagged. Only Python files are in it.
"""

from pathlib import Path

from patches.config import Release, Target
from patches.format.hashes import sha256
from patches.format.series_files import series_files
from patches.maintain import release
from patches.maintain.git import git, git_lines

OLD, BASE = "old-release", "base"
# The tree lives for minutes: packing it well would take longer than everything else.
_IMPORT = ("-c", "core.compression=0", "fast-import", "--quiet", "--depth=0")
_IMPORTER = b"committer The sglang-trace authors <sglang-trace@localhost> 0 +0000\n"


def make_tree(target: Target, source: str, version: str, tree: Path, downloads: Path) -> Release:
    """Make the tree from the releases ``source``, with its series, and ``version``; return that."""
    files = [str(file.resolve()) for file in series_files(target, source).values()]
    tree.mkdir(parents=True)
    git(tree, "init", "--quiet")
    git(tree, "config", "gc.auto", "0")
    _import_release(target, source, tree, downloads / source, "old")
    archive = _import_release(target, version, tree, downloads / version, "new", parent="old")
    git(tree, "tag", OLD, "old")
    git(tree, "tag", BASE, "new")
    git(tree, "checkout", "--quiet", "old")
    git(tree, "am", "--quiet", "--keep-cr", *files)
    git(tree, "checkout", "--quiet", "new")
    return Release(archive.name, sha256(archive.read_bytes()))


def patch_commits(tree: Path) -> list[str]:
    """The commits of the old series, in order."""
    return git_lines(tree, "rev-list", "--reverse", f"{OLD}..old")


def _import_release(
    target: Target, version: str, tree: Path, downloads: Path, branch: str, parent: str = ""
) -> Path:
    """Make a branch of one commit with the files of a release; return the downloaded file."""
    archive = release.download(target, version, downloads, recorded=True)
    message = f"{target.distribution} {version} as released".encode()
    stream = [b"commit refs/heads/%s\n" % branch.encode(), _IMPORTER, _data(message)]
    if parent:
        stream.append(b"from refs/heads/%s\ndeleteall\n" % parent.encode())
    for path, content in release.python_files(archive, target.package):
        stream += [b"M 100644 inline %s\n" % path.encode(), _data(content)]
    git(tree, *_IMPORT, read=b"".join(stream))
    return archive


def _data(content: bytes) -> bytes:
    return b"data %d\n%s\n" % (len(content), content)
