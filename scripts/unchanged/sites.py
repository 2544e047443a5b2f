"""Two copies of one upstream release: as it was published, and patched with our series."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from patches import PatchError
from patches.apply import edit
from patches.apply.installed import Installed, find_installed
from patches.apply.report import report
from patches.apply.state import State
from patches.config import select_target

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Site:
    """A directory to put first on the path; `patched` says which of the two copies it has."""

    target: str
    version: str
    directory: Path
    patched: bool

    def environment(self, *before: Path, **variables: str) -> dict[str, str]:
        """Environment of a process that imports this copy, and `before` in front of all else."""
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        ours = (*before, self.directory, ROOT, *filter(None, inherited))
        path = os.pathsep.join(map(str, ours))
        one_thread = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return os.environ | one_thread | {"PYTHONPATH": path} | variables

    def require_first(self, environment: dict[str, str]) -> None:
        """Check that a process with this environment would import this copy.

        Raises:
            PatchError: it would import another one.
        """
        module = select_target(self.target).package.replace("/", ".")
        code = f"from importlib.util import find_spec; print(find_spec({module!r}).origin)"
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not run.stdout.startswith(f"{self.directory}{os.sep}"):
            found = run.stdout.strip() or run.stderr.strip()[-300:]
            raise PatchError(f"Python finds {found} before {self.directory}: clear PYTHONPATH.")


def make_sites(target: str, version: str | None, directory: Path) -> tuple[Site, Site]:
    """Make the released and the patched copy in `directory`; None means the installed version.

    Raises:
        PatchError: there is no such release or no series for it.
    """
    chosen = select_target(target)
    installed = find_installed(chosen)
    if version is None and installed is None:
        raise PatchError(f"{target} is not installed: name a version with --{target}.")
    released, patched = directory / f"{target}-released", directory / f"{target}-patched"
    if installed is not None and version in (None, installed.version):
        version = installed.version
        _copy_installed(installed, chosen.package, released)
        edit.revert(chosen, released)
    else:
        assert version is not None
        _download(f"{chosen.distribution}=={version}", released)
    found = report(chosen, released)
    if found.state != State.PRISTINE:
        raise PatchError(found.remedy or f"{target} {version} cannot be compared: {found.state}.")
    shutil.copytree(released, patched)
    edit.apply(chosen, patched)
    return Site(target, version, released, False), Site(target, version, patched, True)


def _copy_installed(installed: Installed, package: str, to: Path) -> None:
    """Copy package, metadata and the tool's journal; nothing else of site-packages."""
    journal = f".sglang-trace-patches-{installed.distribution}"
    for name in (Path(package).parts[0], installed.record.parent.name, journal):
        if (installed.site / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(installed.site / name, to / name, ignore=ignored)


def _download(requirement: str, to: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    command += ["--quiet", "--no-deps", "--no-compile", "--ignore-requires-python"]
    run = subprocess.run(
        [*command, "--target", str(to), requirement], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise PatchError(f"pip cannot install {requirement}: {run.stderr.strip()[-300:]}")
