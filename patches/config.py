"""What can be patched: the targets of ``config.json`` and where their series are kept."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patches.errors import PatchError

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Release:
    """The published file that a series was made for and the environments it was tested in.

    Every element of ``tested`` has the keys ``python`` and ``torch``, beginnings of versions.
    """

    file: str
    sha256: str
    tested: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Target:
    """One upstream that we patch.

    ``package`` is the directory, relative to site-packages, that a patch may touch; ``hooks`` is
    the file of this repository, relative to its root, that the patched upstream calls.
    ``version_files``, relative like the package, say the version of a source tree.
    """

    name: str
    distribution: str
    package: str
    hooks: str
    version_files: tuple[str, ...]
    series_dir: Path
    releases: Mapping[str, Release] = field(default_factory=dict)

    def versions(self) -> list[str]:
        """Versions of the upstream that have a series, oldest first."""
        return sorted(
            (path.parent.name for path in self.series_dir.glob("*/series")), key=version_key
        )

    def install_command(self) -> str:
        """The pip command that installs the newest release that has a series."""
        if not self.versions():
            raise PatchError(f"{self.series_dir} has no series: install sglang-trace again.")
        return f"pip install {self.distribution}=={self.versions()[-1]}"


def version_key(version: str) -> list[int]:
    """The numbers of a version, by which versions are ordered."""
    return [int(part) for part in re.findall(r"\d+", version)]


def load_targets(root: Path = ROOT) -> dict[str, Target]:
    """Read ``config.json`` in ``root``; the series of target T are in ``root/T/<version>/``."""
    entries: dict[str, dict[str, Any]] = json.loads((root / "config.json").read_text("utf-8"))
    return {name: _target(name, root, entry) for name, entry in entries.items()}


def _target(name: str, root: Path, entry: dict[str, Any]) -> Target:
    releases = {
        version: Release(release["file"], release["sha256"], tuple(release["tested"]))
        for version, release in entry["releases"].items()
    }
    return Target(
        name=name,
        distribution=entry["distribution"],
        package=entry["package"],
        hooks=entry["hooks"],
        version_files=tuple(entry["version_files"]),
        series_dir=root / name,
        releases=releases,
    )


def record_release(target: Target, version: str, release: Release) -> None:
    """Write into ``config.json`` which published file the series for ``version`` was made for."""
    file = target.series_dir.parent / "config.json"
    entries = json.loads(file.read_text("utf-8"))
    releases = entries[target.name]["releases"]
    releases[version] = {"file": release.file, "sha256": release.sha256, "tested": []}
    entries[target.name]["releases"] = {v: releases[v] for v in sorted(releases, key=version_key)}
    file.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")


def select_target(name: str, root: Path = ROOT) -> Target:
    """Return the target called ``name``; PatchError names the ones there are."""
    targets = load_targets(root)
    if name not in targets:
        raise PatchError(f"there is no target {name!r}; choose one of: {', '.join(targets)}.")
    return targets[name]
