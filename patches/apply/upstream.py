"""What the tool needs to know of the package that it patches, wherever its files lie."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from patches.apply.journal import Manifest
from patches.format.series import Series


class Upstream(Protocol):
    """One release of a target: an installed wheel or a source tree.

    ``site`` is the directory that the paths of patches are relative to. ``lock`` is a file of the
    release that no patch edits; whoever changes the others holds a lock on it.
    """

    @property
    def version(self) -> str:
        """Version of the release."""

    @property
    def stated(self) -> str:
        """The version that the upstream gives itself, empty if it does not say."""

    @property
    def site(self) -> Path:
        """Directory with the package's top directory in it."""

    @property
    def lock(self) -> Path:
        """File to lock."""

    @property
    def described(self) -> str:
        """The beginning of a sentence: what was found where."""

    @property
    def options(self) -> str:
        """Command-line options, with a space before, that lead to this place again."""

    def digest(self, content: bytes) -> str:
        """Hash of a content, of the kind in which the release's own hashes are known."""

    def current(self, path: str) -> bytes | None:
        """Content of ``path`` now, None if there is no such file."""

    def released_hashes(
        self, paths: Iterable[str], series: Series | None, manifest: Manifest | None
    ) -> dict[str, str | None]:
        """Hash that the release has for each path; None for a file it does not have."""

    def fault(self, released: str | None) -> str:
        """Half a sentence: what a file is that is neither ``released`` (a hash) nor patched."""

    def way_back(self, path: str, released: str | None) -> str:
        """Half a sentence: how the user gets the released content of ``path`` again."""

    def way_to(self, version: str) -> str:
        """Half a sentence: how the user gets another release."""


def read_or_none(file: Path) -> bytes | None:
    """Content of a file, None if there is none."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
