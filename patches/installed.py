"""The installed upstream as its wheel's own RECORD describes it; nothing is imported."""

import base64
import csv
import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from patches.config import Target
from patches.errors import PatchError


def sha256(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Installed:
    """A distribution in a site-packages directory. ``record`` is its RECORD file."""

    version: str
    site: Path
    record: Path

    def released_hashes(self, paths: Iterable[str]) -> dict[str, str | None]:
        """SHA-256 (hex) that the release has for each path; None for a file it does not have."""
        hashes: dict[str, str | None] = dict.fromkeys(paths)
        with self.record.open(encoding="utf-8", newline="") as lines:
            for path, digest, _size in csv.reader(lines):
                if path in hashes:
                    hashes[path] = self._hex(path, digest)
        return hashes

    def _hex(self, path: str, digest: str) -> str:
        algorithm, _, value = digest.partition("=")
        if algorithm != "sha256":
            raise PatchError(f"{self.record} has no sha256 for {path}: reinstall it from a wheel.")
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()

    def current(self, path: str) -> bytes | None:
        """Content of ``path`` now, None if there is no such file."""
        try:
            return (self.site / path).read_bytes()
        except FileNotFoundError:
            return None


def find_installed(target: Target, site: Path | None = None) -> Installed | None:
    """Find the target in ``site``, or on this interpreter's path; None if it is not installed.

    PatchError if it is there without a RECORD (an editable or system package), because then
    nothing says what its pristine files are.
    """
    path = sys.path if site is None else [str(site)]
    found = next(iter(metadata.distributions(name=target.distribution, path=path)), None)
    if found is None:
        return None
    root = Path(str(found.locate_file("")))
    escaped = target.distribution.replace("-", "_")
    record = root / f"{escaped}-{found.version}.dist-info" / "RECORD"
    if not record.is_file():
        raise PatchError(
            f"{target.distribution} {found.version} in {root} was not installed from a wheel "
            f"(it has no RECORD): run `pip install {target.distribution}=={found.version}`."
        )
    return Installed(found.version, root, record)
