"""An upstream release in a directory of its own, patched, to be put first on the path.

It holds that one distribution. Everything else that the release imports, torch and transformers
among them, is what the environment has, whatever versions the release itself asks for: what is
tested is our patches on another release, not that release's own choice of dependencies.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from patches import PatchError
from patches.apply import edit
from patches.check.doctor import diagnose
from patches.config import Target
from patches.maintain.release import download


@dataclass(frozen=True)
class Prepared:
    """Where a patched release is (None: in the environment itself), or why it cannot be used."""

    place: Path | None
    failure: str = ""


def prepare(target: Target, version: str, sites: Path) -> Prepared:
    """Finds or makes the patched release and checks that its hooks are live."""
    try:
        in_environment = metadata.version(target.distribution) == version
        place = None if in_environment else make_overlay(target, version, sites)
        require_live_hooks(target, place)
    except PatchError as error:
        return Prepared(None, f"{target.name} {version}: {error}")
    return Prepared(place)


def make_overlay(target: Target, version: str, sites: Path) -> Path:
    """The directory in `sites` with the patched release; downloads it if it is not there yet.

    Raises:
        PatchError: pip cannot get it, it is not the published file, or the series does not apply.
    """
    place = sites / f"{target.name}-{version}"
    if not place.exists():
        sites.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=sites) as scratch:
            unpacked = Path(scratch) / "site"
            _install(download(target, version, Path(scratch) / "download"), unpacked)
            _move(unpacked, place)
    edit.apply(target, place)
    return place


def require_live_hooks(target: Target, place: Path | None) -> None:
    """Imports the release in `place`, or in the environment, and checks every hook in it.

    Raises:
        PatchError: the first hook that is not live, or why the release is not fully patched.
    """
    found = diagnose(target, place)
    if found.report.remedy:
        raise PatchError(found.report.remedy)
    for hook in found.hooks:
        if hook.problem:
            raise PatchError(f"{hook.path}: {hook.function}: {hook.problem}")


def _install(release: Path, into: Path) -> None:
    # Megatron-core's wheels for Python 3.11 say that they want 3.12; they work all the same.
    options = ("--no-deps", "--ignore-requires-python", "--no-compile", "--quiet")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install")
    run = subprocess.run(
        [*pip, *options, "--target", str(into), str(release)], capture_output=True, text=True
    )
    if run.returncode:
        raise PatchError(f"pip cannot install {release.name}: {run.stderr.strip()}")


def _move(unpacked: Path, place: Path) -> None:
    """One rename, so that what has the final name is complete; a second run may have been first."""
    try:
        unpacked.rename(place)
    except OSError:
        if not place.is_dir():
            raise
