"""A source tree of an upstream: a git checkout or an unpacked release. Git is not needed.

A tree has no RECORD. What its pristine files are is said by the patches themselves: the ``index``
line of a patch has git's name of the content that it was made for. So only the files of the series
are known, which are the only ones that are touched.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from patches.apply.journal import Journal, Manifest
from patches.apply.upstream import read_or_none
from patches.config import Target
from patches.errors import NotInstalledError, PatchError
from patches.format.hashes import git_blob
from patches.format.series import Series, load_series

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
    """A release of ``distribution`` in a source tree. ``options`` lead the commands to it.

    ``stated`` is the version that its files say, empty if none. ``fits`` are the versions whose
    series fit it, looked for only if ``version`` has no series.
    """

    distribution: str
    version: str
    stated: str
    fits: tuple[str, ...]
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

        A manifest of another release counts only for the files that are as we left them: the user
        has checked out another version over a patched tree, and the rest is taken as it is.
        """
        edited = {} if series is None else series.pre_images
        recorded = {} if manifest is None else manifest.files
        same_release = manifest is not None and manifest.version == self.version
        hashes: dict[str, str | None] = {}
        for path in paths:
            found = _blob_of(self.site / path)
            if path in edited:
                hashes[path] = edited[path]
            elif path in recorded and (same_release or found == recorded[path].patched):
                hashes[path] = recorded[path].pristine
            else:
                hashes[path] = found
        return hashes

    def fault(self, released: str | None) -> str:
        """An edit, or the tree is at another commit than the release: a tree cannot tell."""
        release = f"{self.distribution} {self.version}"
        return f"is not in {release}" if released is None else f"is not as in {release}"

    def way_back(self, path: str, released: str | None) -> str:
        """By content, because tags are named in many ways; or by the release's commit."""
        if released is None:
            return "remove it"
        file = f"`git -C {self.site} cat-file blob {released} > {self.site / path}`"
        return f"check out the commit of that release or only this file ({file})"

    def way_to(self, version: str) -> str:
        """Take the tree for the release whose files it has, or check that version out."""
        if not self.fits:
            return f"check out version {version}"
        return (
            f"add `--version {self.fits[-1]}`, because the tree has the files of that release "
            f"wherever its series edits them, or check out version {version}"
        )


def find_tree(target: Target, checkout: Checkout, journal: Journal) -> SourceTree:
    """Find the package in a tree and its version.

    The version is the one that the user gives, or the one that an apply has taken the tree for, or
    the one that its files say, or, if they say none, that of the only series that fits.
    NotInstalledError if the tree has no such package, PatchError if its version cannot be told.
    """
    site = site_of(target, checkout)
    files = [site / name for name in target.version_files if (site / name).is_file()]
    stated = _read_version(files)
    version = checkout.version or _applied_version(journal, stated) or stated
    fits = () if version in target.versions() else _fitting_versions(target, site)
    if not version and len(fits) == 1:
        version = fits[0]
    if not version:
        raise PatchError(
            f"{checkout.path} does not say which version of {target.name} it has: add "
            f"--version with one of {', '.join(fits or target.versions())}."
        )
    named = "" if checkout.version is None else f" --version {version}"
    options = f" --tree {checkout.path}{named}"
    return SourceTree(target.distribution, version, stated, fits, site, files[0], options)


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


def _read_version(files: list[Path]) -> str:
    """The version that is written out in one of the files; empty if it is computed on import."""
    for file in files:
        text = file.read_text("utf-8")
        if found := _VERSION.search(text):
            return found[1]
        parts = [re.search(rf"^{part} = (\d+)$", text, re.MULTILINE) for part in _PARTS]
        suffix = re.search(r"""^PRE_RELEASE = ["'](\w*)["']""", text, re.MULTILINE)
        if all(parts) and suffix:
            return ".".join(part[1] for part in parts if part) + suffix[1]
    return ""


def _applied_version(journal: Journal, stated: str) -> str:
    """The release that an apply has taken the tree for, unless it has another version by now."""
    manifest = journal.load()
    return manifest.version if manifest is not None and manifest.stated == stated else ""


def _fitting_versions(target: Target, site: Path) -> tuple[str, ...]:
    """The versions whose series finds in the tree exactly the files that it was made for."""
    return tuple(
        version
        for version in target.versions()
        if all(
            _blob_of(site / path) == blob
            for path, blob in load_series(target, version).pre_images.items()
        )
    )


def _blob_of(file: Path) -> str | None:
    content = read_or_none(file)
    return None if content is None else git_blob(content)
