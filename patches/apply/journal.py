"""What the tool keeps beside the packages while a target is patched.

``<site-packages>/.sglang-trace-patches-<target>/`` holds ``manifest.json`` and the pristine files,
named by their hashes: SHA-256 beside an installed package, git's name of the blob in a source tree.
The manifest is complete and on disk before the first file of the package
changes and is removed after the last one is restored. It holds no progress mark: the hashes of the
files say how far an interrupted run has come.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from patches.errors import PatchError

_AGAIN = (
    "reinstall the package with `pip install --force-reinstall --no-deps` (in a source tree: "
    "check its files out again)"
)


@dataclass(frozen=True)
class FileHashes:
    """Hashes (hex) of one file; ``pristine`` is None for a file that the series adds."""

    pristine: str | None
    patched: str


@dataclass(frozen=True)
class Manifest:
    """The digest of an applied series and the hashes of every file that it changes.

    ``version`` is the release that the series was made for and ``stated`` the version that the
    upstream gave itself then, empty if none. They differ where a source tree was taken for a
    release that has the same files; beside an installed package neither is looked at.
    """

    series: str
    files: dict[str, FileHashes]
    version: str
    stated: str


@dataclass(frozen=True)
class Journal:
    """The directory that makes an apply reversible; ``digest`` names the contents in it."""

    directory: Path
    digest: Callable[[bytes], str]

    @property
    def staged(self) -> Path:
        """Where the next content of a file is written before it takes the file's place."""
        return self.directory / "staged"

    def load(self) -> Manifest | None:
        """Read the manifest; None if nothing was applied, PatchError if it is damaged."""
        try:
            raw = json.loads((self.directory / "manifest.json").read_bytes())
            files = {path: FileHashes(**hashes) for path, hashes in raw["files"].items()}
            version, stated = raw.get("version", ""), raw.get("stated", "")
            return Manifest(raw["series"], files, version, stated)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise PatchError(
                f"the manifest in {self.directory} is damaged: remove that directory and {_AGAIN}."
            ) from None

    def save(self, manifest: Manifest, pristine: Mapping[str, bytes | None]) -> None:
        """Put the pristine contents and then the manifest on disk."""
        self.directory.mkdir(exist_ok=True)
        # In a git checkout: `git clean` and `git stash` shall not take away what revert needs.
        self._write(".gitignore", b"*\n")
        for content in pristine.values():
            if content is not None:
                self._write(self.digest(content), content)
        self._write("manifest.json", json.dumps(asdict(manifest), indent=1).encode())
        sync_directory(self.directory.parent)

    def pristine(self, digest: str) -> bytes:
        """Return the saved content with this hash; PatchError if it is damaged."""
        with suppress(FileNotFoundError):
            content = (self.directory / digest).read_bytes()
            if self.digest(content) == digest:
                return content
        raise PatchError(
            f"the saved pristine file {self.directory / digest} is damaged: remove "
            f"{self.directory} and {_AGAIN}."
        )

    def remove(self) -> None:
        """Forget the apply: the manifest goes first, so that no half manifest is ever believed."""
        if self.directory.exists():
            (self.directory / "manifest.json").unlink(missing_ok=True)
            sync_directory(self.directory)
            shutil.rmtree(self.directory)

    def _write(self, name: str, content: bytes) -> None:
        write_durably(self.staged, content)
        self.staged.replace(self.directory / name)
        sync_directory(self.directory)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
