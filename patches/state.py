"""In which state an installed target is, judged by the hashes of its files alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from patches.config import ROOT, Target, select_target
from patches.errors import NotInstalledError, PatchError, file_errors_explained
from patches.installed import Installed, find_installed, sha256
from patches.journal import FileHashes, Journal, Manifest
from patches.series import Series, load_series


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
    """A target, what is installed of it, and what its files show.

    ``series`` is the one for the installed version, None if there is none. ``released`` has the
    SHA-256 that the release has for every file of interest. ``reversible`` are the files of the
    manifest that this very release has; ``patched`` those of them that are patched now. ``faults``
    says for every file that is neither pristine nor patched what is wrong with it.
    """

    target: Target
    installed: Installed
    series: Series | None
    manifest: Manifest | None
    released: dict[str, str | None]
    reversible: dict[str, FileHashes]
    patched: tuple[str, ...]
    faults: dict[str, str]

    @property
    def journal(self) -> Journal:
        """Where the reverse information of this target is kept."""
        return journal_of(self.target, self.installed)

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
                content[path] = None if digest is None else self.installed.current(path)
        return content

    def remedy(self) -> str:
        """One sentence: what is the matter and which command mends it; empty if patched."""
        name, version = self.target.name, self.installed.version
        distribution = self.target.distribution
        apply = f"`python -m patches apply {name}`"
        match self.state:
            case State.FOREIGN:
                path, problem = next(iter(self.faults.items()))
                others = f" and {len(self.faults) - 1} more files" if len(self.faults) > 1 else ""
                return (
                    f"{self.installed.site / path} {problem}{others}: save what you need of it, "
                    f"remove it, and run `pip install --force-reinstall --no-deps "
                    f"{distribution}=={version}`, then {apply}."
                )
            case State.UNSUPPORTED:
                return (
                    f"{distribution} {version} is installed but there are patches only for "
                    f"{', '.join(self.target.versions())}: "
                    f"run `{self.target.install_command()}`, then {apply}."
                )
            case State.PRISTINE:
                return f"{distribution} {version} is not patched: run {apply}."
            case State.OUTDATED:
                return f"{distribution} {version} is patched with another series: run {apply}."
            case State.INTERRUPTED:
                return (
                    f"an apply or revert of {name} was interrupted: "
                    f"run `python -m patches revert {name}` or {apply}."
                )
        return ""


def journal_of(target: Target, installed: Installed) -> Journal:
    """The journal of a target in the site-packages directory where it is installed."""
    return Journal(installed.site / f".sglang-trace-patches-{target.name}")


def require_installed(target: Target, site: Path | None = None) -> Installed:
    """Find the target; NotInstalledError with the command that installs it if it is not there."""
    installed = find_installed(target, site)
    if installed is None:
        where = "" if site is None else f" in {site}"
        raise NotInstalledError(
            f"{target.distribution} is not installed{where}: "
            f"run `{target.install_command()}`, then `python -m patches apply {target.name}`."
        )
    return installed


def series_for(target: Target, installed: Installed) -> Series | None:
    """Load the series for the installed version, None if there is none."""
    has_series = installed.version in target.versions()
    return load_series(target, installed.version) if has_series else None


def inspect(target: Target, installed: Installed, series: Series | None) -> Inspection:
    """Hash every file of the series and of the manifest and compare with RECORD and manifest.

    Each file is judged for itself: a manifest entry counts only where RECORD still has its pristine
    hash, so what is left over from an older release is told from what is patched in this one.
    """
    manifest = journal_of(target, installed).load()
    recorded = {} if manifest is None else manifest.files
    added = () if series is None else series.paths
    released = installed.released_hashes(sorted({*recorded, *added}))
    reversible = {p: h for p, h in recorded.items() if h.pristine == released[p]}
    patched: list[str] = []
    faults: dict[str, str] = {}
    for path, digest in released.items():
        content = installed.current(path)
        found = None if content is None else sha256(content)
        if path in reversible and found == reversible[path].patched:
            patched.append(path)
        elif found != digest:
            faults[path] = _fault(found, digest)
    return Inspection(
        target, installed, series, manifest, released, reversible, tuple(patched), faults
    )


def _fault(found: str | None, released: str | None) -> str:
    if found is None:
        return "is missing"
    return "is not part of the release" if released is None else "was edited by someone else"


def verify_target(name: str, *, site: Path | None = None, root: Path = ROOT) -> None:
    """Return if target ``name`` is fully patched with the current series, else raise PatchError.

    The sentence of the error names the command that mends it. Reads the files that the series
    edits and imports nothing, so a launcher can afford it at every start. ``site`` is another
    site-packages directory, ``root`` another directory with a ``config.json`` and series.
    """
    target = select_target(name, root)
    with file_errors_explained():
        installed = require_installed(target, site)
        inspection = inspect(target, installed, series_for(target, installed))
    if inspection.state is not State.PATCHED:
        raise PatchError(inspection.remedy())
