"""Git, for the maintainer's commands only; whoever applies a series does not need it."""

import os
import subprocess
from pathlib import Path

from patches.errors import PatchError

_WHO = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in (("NAME", "The sglang-trace authors"), ("EMAIL", "sglang-trace@localhost"))
}
# A user's settings (signatures, prefixes, renames, editors) must not leak into the files, and
# where we are called from a git hook its repository must not be taken for ours.
_SETTINGS = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_EDITOR": "true",
    **_WHO,
}
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def attempt(tree: Path, *arguments: str, read: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git in ``tree``, with ``read`` on its input; the caller looks at the exit code."""
    inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    command = ["git", "-C", str(tree), *arguments]
    try:
        environment = {**inherited, **_SETTINGS}
        return subprocess.run(command, input=read, capture_output=True, env=environment)
    except FileNotFoundError:
        raise PatchError("export and rebase need git: install it.") from None


def git(tree: Path, *arguments: str, read: bytes = b"") -> bytes:
    """Run git in ``tree`` and return what it prints; PatchError with its words if it fails."""
    run = attempt(tree, *arguments, read=read)
    if run.returncode:
        words = (run.stderr.decode(errors="replace") or run.stdout.decode(errors="replace")).strip()
        raise PatchError(f"git says: {words}.")
    return run.stdout


def git_lines(tree: Path, *arguments: str) -> list[str]:
    """Run git in ``tree`` and return the lines that it prints."""
    return git(tree, *arguments).decode().splitlines()


def file_at(tree: Path, commit: str, path: str) -> bytes | None:
    """Content of ``path`` in a commit, None if the commit has no such file."""
    run = attempt(tree, "show", f"{commit}:{path}")
    return None if run.returncode else run.stdout
