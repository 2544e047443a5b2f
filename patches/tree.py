"""A source tree of an upstream: a git checkout or an unpacked release. Git is not needed.

A tree has no RECORD. What its pristine files are is said by the patches themselves: the ``index``
line of a patch has git's name of the content that it was made for. So only the files of the series
are known, which are the only ones that are touched.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from patches.config import Target
from patches.errors import NotInstalledError, PatchError
from patches.hashes import git_blob
from patches.journal import Journal, Manifest
from patches.series import Series
from patches.upstream import read_or_none

LAYOUTS = (".", "python")
"""Where the package lies in a tree: at its root (Megatron-LM, sdists) or as in SGLang's."""

_VERSION = re.compile(r"""^__version__ = (?:\w+ = )?["']([^"']+)["']$""", re.MULTILINE)
_PARTS = ("MAJOR", "MINOR", "PATCH")


@dataclass(frozen=True)
class Checkout:
    """The source tree that the user points at; ``version`` where its files cannot say it."""

    path: Path
    version: str | None = None


@dataclass(frozen=True)
class SourceTree:
    """A release of ``distribution`` in a source tree. ``options`` lead the commands to it."""

    distribution: str
    version: str
    site: Path
    lock: Path
    options: str

    @property
    def described(self) -> str:
        """What the tree has."""
        return f"{self.site} has {self.distribution} {self.version}"

    def digest(self, content: bytes) -> str:
        """Git's name of the content, as in the patches."""
        return git_blob(content)

    def current(self, path: str) -> bytes | None:
        """Content of ``path`` now, None if there is no such file."""
        return read_or_none(self.site / path)

    def released_hashes(
        self, paths: Iterable[str], series: Series | None, manifest: Manifest | None
    ) -> dict[str, str | None]:
        """Git's names from the series; for a file that it does not edit, from the manifest.

        A manifest of another release says nothing about this one: the user has checked out
        another version over a patched tree, and a file that we do not patch is taken as it is.
        """
        edited = {} if series is None else series.pre_images
        same_release = manifest is not None and manifest.version == self.version
        recorded = manifest.files if manifest is not None and same_release else {}
        hashes: dict[str, str | None] = {}
        for path in paths:
            if path in edited:
                hashes[path] = edited[path]
            elif path in recorded:
                hashes[path] = recorded[path].pristine
            else:
                content = self.current(path)
                hashes[path] = None if content is None else git_blob(content)
        return hashes

    def way_back(self, path: str) -> str:
        """Check the file out again."""
        return (
            f"bring back what {self.distribution} {self.version} has there "
            f"(`git -C {self.site} checkout v{self.version} -- {path}` in a clone)"
        )

    def way_to(self, version: str) -> str:
        """Check that version out."""
        return f"check out version {version}"


def find_tree(target: Target, checkout: Checkout, journal: Journal) -> SourceTree:
    """Find the package in a tree and its version.

    NotInstalledError if the tree has no such package, PatchError if its version cannot be told.
    """
    site = site_of(target, checkout)
    files = [site / name for name in target.version_files if (site / name).is_file()]
    version = checkout.version or _read_version(files) or _patched_version(journal)
    if version is None:
        raise PatchError(
            f"{checkout.path} does not say which version of {target.name} it has: add "
            f"--version with one of {', '.join(target.versions())}."
        )
    named = "" if checkout.version is None else f" --version {version}"
    options = f" --tree {checkout.path}{named}"
    return SourceTree(target.distribution, version, site, files[0], options)


def site_of(target: Target, checkout: Checkout) -> Path:
    """The directory of a tree that the paths of patches are relative to."""
    for layout in LAYOUTS:
        site = checkout.path / layout
        if any((site / name).is_file() for name in target.version_files):
            return site
    raise NotInstalledError(
        f"{checkout.path} has no {target.package}/: point --tree at the root of a checkout of "
        f"{target.name} or of its unpacked sources."
    )


def _read_version(files: list[Path]) -> str | None:
    """The version that is written out in one of the files, None if it is computed when imported."""
    for file in files:
        text = file.read_text("utf-8")
        if found := _VERSION.search(text):
            return found[1]
        parts = [re.search(rf"^{part} = (\d+)$", text, re.MULTILINE) for part in _PARTS]
        suffix = re.search(r"""^PRE_RELEASE = ["'](\w*)["']""", text, re.MULTILINE)
        if all(parts) and suffix:
            return ".".join(part[1] for part in parts if part) + suffix[1]
    return None


def _patched_version(journal: Journal) -> str | None:
    manifest = journal.load()
    return None if manifest is None else manifest.version or None
