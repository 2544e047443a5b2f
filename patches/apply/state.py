"""In which state a target is, judged by the hashes of its files alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from patches.apply.imported import imported_from
from patches.apply.installed import find_installed
from patches.apply.journal import FileHashes, Journal, Manifest
from patches.apply.tree import Checkout, find_tree, site_of
from patches.apply.upstream import Upstream
from patches.config import ROOT, Target, select_target
from patches.errors import NotInstalledError, PatchError, file_errors_explained
from patches.format.hashes import git_blob
from patches.format.series import Series, load_series

Where = Path | Checkout | None
"""A site-packages directory, a source tree, or (None) what Python would import."""


class State(StrEnum):
    """What a target as a whole can be."""

    NOT_INSTALLED = "not installed"
    UNSUPPORTED = "unsupported version"
    PRISTINE = "pristine"
    PATCHED = "patched"
    OUTDATED = "patched with another series"
    INTERRUPTED = "interrupted"
    FOREIGN = "foreign edits"


@dataclass(frozen=True)
class Inspection:
    """A target, the release of it that was found, and what its files show.

    ``series`` is the one for that release, None if there is none. ``released`` has the hash that
    the release has for every file of interest. ``reversible`` are the files of the
    manifest that this very release has; ``patched`` those of them that are patched now. ``faults``
    says for every file that is neither pristine nor patched what is wrong with it.
    """

    target: Target
    upstream: Upstream
    series: Series | None
    manifest: Manifest | None
    released: dict[str, str | None]
    reversible: dict[str, FileHashes]
    patched: tuple[str, ...]
    faults: dict[str, str]

    @property
    def journal(self) -> Journal:
        """Where the reverse information of this target is kept."""
        return Journal(_journal_directory(self.target, self.upstream.site), self.upstream.digest)

    @property
    def state(self) -> State:
        """The state of the target as a whole; the first that holds, in this order."""
        if self.faults:
            return State.FOREIGN
        if self.series is None:
            return State.UNSUPPORTED
        if self.manifest is None or not self.patched:
            return State.PRISTINE
        if len(self.patched) < len(self.reversible):
            return State.INTERRUPTED
        complete = len(self.reversible) == len(self.manifest.files)
        current = complete and self.manifest.series == self.series.digest
        return State.PATCHED if current else State.OUTDATED

    def pristine_content(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        """Return what the release has for each path, from the file itself or from the journal."""
        content: dict[str, bytes | None] = {}
        for path in paths:
            digest = self.released[path]
            if digest is not None and path in self.patched:
                content[path] = self.journal.pristine(digest)
            else:
                content[path] = None if digest is None else self.upstream.current(path)
        return content

    def remedy(self) -> str:
        """What is wrong and which command fixes it; empty if patched."""
        name, release = self.target.name, f"{self.target.distribution} {self.upstream.version}"
        options = f"{name}{self.upstream.options}"
        apply = f"`python -m patches apply {options}`"
        match self.state:
            case State.FOREIGN:
                path, problem = next(iter(self.faults.items()))
                others = f" and {len(self.faults) - 1} more files" if len(self.faults) > 1 else ""
                return (
                    f"{self.upstream.site / path} {problem}{others}: save what you need of it, "
                    f"{self.upstream.way_back(path, self.released[path])}, then {apply}."
                )
            case State.UNSUPPORTED:
                versions = self.target.versions()
                return (
                    f"{self.upstream.described} but there are patches only for "
                    f"{', '.join(versions)}: {self.upstream.way_to(versions[-1])}, then {apply}."
                )
            case State.PRISTINE:
                return f"{release} is not patched: run {apply}."
            case State.OUTDATED:
                return f"{release} is patched with another series: run {apply}."
            case State.INTERRUPTED:
                return (
                    f"an apply or revert of {name} was interrupted: "
                    f"run `python -m patches revert {options}` or {apply}."
                )
        return ""


def _journal_directory(target: Target, site: Path) -> Path:
    return site / f".sglang-trace-patches-{target.name}"


def require_upstream(target: Target, where: Where = None) -> Upstream:
    """Find the target; NotInstalledError with the command that installs it if it is not there.

    Without ``where`` it is the copy that Python would import: an overlay or a source tree that
    comes before site-packages on the path is found first.
    """
    place = imported_from(target) if where is None else where
    if isinstance(place, Checkout):
        directory = _journal_directory(target, site_of(target, place))
        return find_tree(target, place, Journal(directory, git_blob))
    installed = find_installed(target, place)
    if installed is None:
        there = "" if where is None else f" in {where}"
        raise NotInstalledError(
            f"{target.distribution} is not installed{there}: "
            f"run `{target.install_command()}`, then `python -m patches apply {target.name}`."
        )
    return installed


def series_for(target: Target, upstream: Upstream) -> Series | None:
    """Load the series for the release that was found, None if there is none."""
    has_series = upstream.version in target.versions()
    return load_series(target, upstream.version) if has_series else None


def inspect(target: Target, upstream: Upstream, series: Series | None) -> Inspection:
    """Hash every file of the series and of the manifest and compare with release and manifest.

    Each file is judged for itself: a manifest entry counts only where the release still has its
    pristine hash: leftovers of an older release do not count as patched.
    """
    manifest = Journal(_journal_directory(target, upstream.site), upstream.digest).load()
    recorded = {} if manifest is None else manifest.files
    added = () if series is None else series.paths
    released = upstream.released_hashes(sorted({*recorded, *added}), series, manifest)
    reversible = {p: h for p, h in recorded.items() if h.pristine == released[p]}
    patched: list[str] = []
    faults: dict[str, str] = {}
    for path, digest in released.items():
        content = upstream.current(path)
        found = None if content is None else upstream.digest(content)
        if path in reversible and found == reversible[path].patched:
            patched.append(path)
        elif found != digest:
            faults[path] = "is missing" if found is None else upstream.fault(digest)
    return Inspection(
        target, upstream, series, manifest, released, reversible, tuple(patched), faults
    )


def verify_target(name: str, *, site: Where = None, root: Path = ROOT) -> None:
    """Return if target ``name`` is fully patched with the current series, else raise PatchError.

    The error message names the command that fixes it. Reads the files that the series
    edits and imports nothing, so a launcher can afford it at every start. ``site`` is another
    site-packages directory or a source tree, ``root`` another directory with a ``config.json`` and
    series.
    """
    target = select_target(name, root)
    with file_errors_explained():
        upstream = require_upstream(target, site)
        inspection = inspect(target, upstream, series_for(target, upstream))
    if inspection.state is not State.PATCHED:
        raise PatchError(inspection.remedy())
