"""What can be patched: the targets of ``config.json`` and where their series are kept."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from patches.errors import PatchError

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Target:
    """One upstream that we patch.

    ``package`` is the directory, relative to site-packages, that a patch may touch; ``hooks`` is
    the file of this repository, relative to its root, that the patched upstream calls.
    """

    name: str
    distribution: str
    package: str
    hooks: str
    series_dir: Path

    def versions(self) -> list[str]:
        """Versions of the upstream that have a series, oldest first."""
        names = (path.parent.name for path in self.series_dir.glob("*/series"))
        return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])

    def install_command(self) -> str:
        """The pip command that installs the newest release that has a series."""
        if not self.versions():
            raise PatchError(f"{self.series_dir} has no series: install sglang-trace again.")
        return f"pip install {self.distribution}=={self.versions()[-1]}"


def load_targets(root: Path = ROOT) -> dict[str, Target]:
    """Read ``config.json`` in ``root``; the series of target T are in ``root/T/<version>/``."""
    entries: dict[str, dict[str, str]] = json.loads((root / "config.json").read_text("utf-8"))
    return {
        name: Target(name=name, series_dir=root / name, **entry) for name, entry in entries.items()
    }


def select_target(name: str, root: Path = ROOT) -> Target:
    """Return the target called ``name``; PatchError names the ones there are."""
    targets = load_targets(root)
    if name not in targets:
        raise PatchError(f"there is no target {name!r}; choose one of: {', '.join(targets)}.")
    return targets[name]
