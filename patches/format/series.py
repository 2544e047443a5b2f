"""The ordered patches for one release of one target."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from patches.config import Target
from patches.errors import PatchError
from patches.format.patchfile import Patch, parse_patch
from patches.format.series_files import series_files


@dataclass(frozen=True)
class Series:
    """Patches in the order of application; ``digest`` changes with any byte of any of them."""

    version: str
    patches: tuple[Patch, ...]
    digest: str

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file that the series edits or adds, relative to site-packages, sorted."""
        return tuple(sorted({diff.path for patch in self.patches for diff in patch.diffs}))

    @property
    def pre_images(self) -> dict[str, str | None]:
        """Git's name of the released content of every path; None for a file that is added."""
        found: dict[str, str | None] = {}
        for patch in self.patches:
            for diff in patch.diffs:
                found.setdefault(diff.path, None if diff.creates else diff.blobs[0])
        return found

    @property
    def hooks(self) -> tuple[str, ...]:
        """Every function of our ``hooks.py`` that the patched target calls, sorted."""
        return tuple(sorted({hook for patch in self.patches for hook in patch.hooks}))

    def edited_lines(self) -> dict[str, int]:
        """Added plus removed lines of the upstream by patch group."""
        lines: Counter[str] = Counter()
        for patch in self.patches:
            lines[patch.group] += patch.edited_lines
        return dict(lines)

    def results(self, pristine: Mapping[str, bytes | None]) -> dict[str, bytes]:
        """Content of every path after the whole series, computed in memory.

        ``pristine`` has the released content of every path, None where the release has no such
        file. PatchError names the patch that does not apply.
        """
        current = dict(pristine)
        for patch in self.patches:
            for diff in patch.diffs:
                try:
                    current[diff.path] = diff.apply(current[diff.path])
                except PatchError as error:
                    raise PatchError(f"{patch.name}: {error}") from None
        return {path: content for path, content in current.items() if content is not None}


def load_series(target: Target, version: str) -> Series:
    """Read the series of ``target`` for ``version``; PatchError if there is none or it is bad."""
    patches: list[Patch] = []
    digest = hashlib.sha256(version.encode())
    for name, file in series_files(target, version).items():
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise PatchError(
                f"the series of {target.name} {version} lists {name}, which is missing: "
                "restore the file or take the line out."
            ) from None
        digest.update(f"{name} {len(content)}\n".encode() + content)
        patches.append(parse_patch(name, content))
        _refuse_strangers(patches[-1], target)
    return Series(version, tuple(patches), digest.hexdigest())


def _refuse_strangers(patch: Patch, target: Target) -> None:
    for diff in patch.diffs:
        if not diff.path.startswith(f"{target.package}/"):
            raise PatchError(f"{patch.name}: {diff.path} is outside {target.package}/.")
