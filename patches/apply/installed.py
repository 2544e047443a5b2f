"""The installed upstream as its wheel's own RECORD describes it; nothing is imported."""

import base64
import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from patches.apply.journal import Manifest
from patches.apply.upstream import read_or_none
from patches.config import Target
from patches.errors import PatchError
from patches.format.hashes import sha256
from patches.format.series import Series


@dataclass(frozen=True)
class Installed:
    """A distribution in a site-packages directory. ``record`` is its RECORD file."""

    distribution: str
    version: str
    site: Path
    record: Path
    options: str = ""

    @property
    def lock(self) -> Path:
        """RECORD: it exists anyway and pip alone changes it."""
        return self.record

    @property
    def stated(self) -> str:
        """The version of the metadata."""
        return self.version

    @property
    def described(self) -> str:
        """What is installed."""
        return f"{self.distribution} {self.version} is installed in {self.site}"

    def digest(self, content: bytes) -> str:
        """SHA-256 (hex), as in RECORD."""
        return sha256(content)

    def current(self, path: str) -> bytes | None:
        """Content of ``path`` now, None if there is no such file."""
        return read_or_none(self.site / path)

    def released_hashes(
        self, paths: Iterable[str], series: Series | None, manifest: Manifest | None
    ) -> dict[str, str | None]:
        """SHA-256 (hex) that RECORD has for each path; RECORD knows all, so nothing else counts."""
        hashes: dict[str, str | None] = dict.fromkeys(paths)
        with self.record.open(encoding="utf-8", newline="") as lines:
            for path, digest, _size in csv.reader(lines):
                if path in hashes:
                    hashes[path] = self._hex(path, digest)
        return hashes

    def fault(self, released: str | None) -> str:
        """RECORD knows every file, so what it does not know was put or edited there."""
        return "is not part of the release" if released is None else "was edited by someone else"

    def way_back(self, path: str, released: str | None) -> str:
        """Reinstall: pip overwrites neither an edited nor a stray file of the same version."""
        return (
            f"remove it, and run `pip install --force-reinstall --no-deps "
            f"{self.distribution}=={self.version}`"
        )

    def way_to(self, version: str) -> str:
        """Install that version."""
        return f"run `pip install {self.distribution}=={version}`"

    def _hex(self, path: str, digest: str) -> str:
        algorithm, _, value = digest.partition("=")
        if algorithm != "sha256":
            raise PatchError(f"{self.record} has no sha256 for {path}: reinstall it from a wheel.")
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def find_installed(target: Target, site: Path | None = None) -> Installed | None:
    """Find the target in ``site``, or first on this interpreter's path; None if it is not there.

    PatchError if it is there without a RECORD (an editable or system package), because then
    nothing says what its pristine files are, or in two versions, because then nothing says of
    which one the files are.
    """
    path = sys.path if site is None else [str(site)]
    first = next(iter(metadata.distributions(name=target.distribution, path=path)), None)
    if first is None:
        return None
    root = Path(str(first.locate_file("")))
    all_here = metadata.distributions(name=target.distribution, path=[str(root)])
    versions = sorted({each.version for each in all_here})
    if len(versions) > 1:
        raise PatchError(
            f"{root} has {target.distribution} in more than one version ({', '.join(versions)}): "
            "remove them all and install one."
        )
    escaped = target.distribution.replace("-", "_")
    record = root / f"{escaped}-{first.version}.dist-info" / "RECORD"
    if not record.is_file():
        raise PatchError(
            f"{target.distribution} {first.version} in {root} was not installed from a wheel "
            f"(it has no RECORD): run `pip install {target.distribution}=={first.version}`, or "
            "name the source tree with --tree."
        )
    return Installed(target.distribution, first.version, root, record)
