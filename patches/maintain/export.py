"""From a git tree with one commit a patch to the files of a series, byte-stable."""

import re
from pathlib import Path

from patches.config import Target
from patches.errors import PatchError
from patches.format.patchfile import Patch, parse_patch
from patches.format.series import Series, load_series
from patches.format.series_files import write_series_files
from patches.maintain.git import git, git_lines

_FORMAT = (
    *("-c", "format.signOff=false", "-c", "diff.noprefix=false", "-c", "core.quotePath=false"),
    *("format-patch", "-1", "--stdout", "--zero-commit", "--no-signature", "--no-numbered"),
    *("--full-index", "--no-stat", "--no-renames", "--subject-prefix=PATCH", "--unified=3"),
    # Paths as in site-packages, also where the package lies below a clone's python/.
    "--relative",
    *("--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/", "--no-attach"),
)


def export_series(target: Target, version: str, site: Path, base: str) -> Series:
    """Write ``base..HEAD`` as the series of ``target`` for ``version``; return it.

    ``site`` is the directory of a git tree that the package's top directory is in.

    The commits become ``<subject in kebab case>.patch`` in commit order. Files of patches that are
    no longer in the tree are removed. The result depends on the commits alone, not on git's
    configuration. PatchError if a commit is not a patch in our form; nothing is written then.
    """
    commits = git_lines(site, "rev-list", "--reverse", "--no-merges", f"{base}..HEAD")
    contents = [commit_as_patch(site, commit) for commit in commits]
    files = {file_name(parse_patch("commit", content)): content for content in contents}
    if len(files) < len(commits) or not files:
        raise PatchError(f"{site} needs commits after {base}, each with a subject of its own.")
    write_series_files(target, version, files)
    return load_series(target, version)


def commit_as_patch(site: Path, commit: str) -> bytes:
    """The patch file of one commit, whatever git is configured to do."""
    return git(site, *_FORMAT, commit)


def file_name(patch: Patch) -> str:
    """The subject in kebab case."""
    return re.sub(r"[^a-z0-9]+", "-", patch.subject.lower()).strip("-") + ".patch"
