"""From a git tree with one commit a patch to the files of a series, byte-stable."""

import os
import re
import subprocess
from pathlib import Path

from patches.config import Target
from patches.errors import PatchError
from patches.patchfile import Patch, parse_patch
from patches.series import Series, load_series

_FORMAT = (
    *("-c", "format.signOff=false", "-c", "diff.noprefix=false", "-c", "core.quotePath=false"),
    *("format-patch", "-1", "--stdout", "--zero-commit", "--no-signature", "--no-numbered"),
    *("--full-index", "--no-stat", "--no-renames", "--subject-prefix=PATCH", "--unified=3"),
    *("--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/", "--no-attach"),
)


def export_series(target: Target, version: str, tree: Path, base: str) -> Series:
    """Write ``base..HEAD`` of ``tree`` as the series of ``target`` for ``version``; return it.

    The commits become ``<subject in kebab case>.patch`` in commit order. Files of patches that are
    no longer in the tree are removed. The result depends on the commits alone, not on git's
    configuration. PatchError if a commit is not a patch in our form; nothing is written then.
    """
    commits = _git(tree, "rev-list", "--reverse", "--no-merges", f"{base}..HEAD").decode().split()
    contents = [_git(tree, *_FORMAT, commit) for commit in commits]
    files = {file_name(parse_patch("commit", content)): content for content in contents}
    if len(files) < len(commits) or not files:
        raise PatchError(f"{tree} needs commits after {base}, each with a subject of its own.")
    directory = target.series_dir / version
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("*.patch"):
        if stale.name not in files:
            stale.unlink()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    (directory / "series").write_text("".join(f"{name}\n" for name in files), "utf-8")
    return load_series(target, version)


def file_name(patch: Patch) -> str:
    """The subject in kebab case."""
    return re.sub(r"[^a-z0-9]+", "-", patch.subject.lower()).strip("-") + ".patch"


def _git(tree: Path, *arguments: str) -> bytes:
    # A user's settings (signatures, prefixes, renames) must not leak into the files.
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-C", str(tree), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, check=True, env=environment)
    except FileNotFoundError:
        raise PatchError("export needs git: install it.") from None
    except subprocess.CalledProcessError as error:
        raise PatchError(f"git says: {error.stderr.decode().strip()}.") from None
    return run.stdout
