"""Moving a series to another release: a three-way merge of every patch in a scratch git tree.

Each patch, a commit on the old release, is cherry-picked onto the new one: git knows the file that
the patch was made for, so it follows moved lines and renamed files, and it says where release and
patch changed the same lines.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from patches.config import Release, Target, record_release, version_key
from patches.errors import PatchError
from patches.format.patchfile import Patch, parse_patch
from patches.format.series import Series, load_series
from patches.format.series_files import series_files, write_series_files
from patches.maintain.conflict import Conflict, as_json, as_markdown, find_conflicts, has_markers
from patches.maintain.export import commit_as_patch, export_series
from patches.maintain.git import attempt, file_at, git, git_lines
from patches.maintain.progress import Outcome, Progress, merged
from patches.maintain.scratch_tree import BASE, make_tree, patch_commits


@dataclass(frozen=True)
class Stopped:
    """A patch that does not merge: what is in the way and the report about it."""

    patch: Patch
    conflicts: list[Conflict]
    report: Path


def nearest_version(target: Target, version: str) -> str:
    """The version whose series is moved to ``version``.

    The newest older or the oldest newer one, whichever is nearer, the older if both are as near.
    """
    versions, wanted = target.versions(), version_key(version)
    if version in versions:
        raise PatchError(
            f"{target.name} {version} has a series already: name the series to make it anew from "
            "with --from."
        )
    older = [each for each in versions if version_key(each) < wanted]
    newer = [each for each in versions if version_key(each) > wanted]
    neighbours = older[-1:] + newer[:1]
    if not neighbours:
        raise PatchError(f"{target.name} has no series to start from: export one first.")
    return min(neighbours, key=lambda each: _distance(version_key(each), wanted))


def _distance(one: list[int], other: list[int]) -> list[int]:
    width = max(len(one), len(other))
    padded = (numbers + [0] * (width - len(numbers)) for numbers in (one, other))
    return [abs(a - b) for a, b in zip(*padded, strict=True)]


@dataclass(frozen=True)
class Rebase:
    """One series on its way to another release, in the directory ``work``."""

    target: Target
    work: Path
    progress: Progress

    @classmethod
    def start(cls, target: Target, source: str, version: str, work: Path) -> "Rebase":
        """Download both releases and make the tree; PatchError if ``work`` is in use."""
        if work.exists() and any(work.iterdir()):
            raise PatchError(
                f"{work} is in use: run `python -m patches rebase {target.name} --continue` or "
                "--abort with it, or name another directory with --work."
            )
        try:
            made = make_tree(target, source, version, work / "tree", work / "downloads")
            shutil.rmtree(work / "downloads")
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        (head,) = git_lines(work / "tree", "rev-parse", "HEAD")
        progress = Progress(target.name, source, version, made.file, made.sha256, head)
        found = cls(target, work, progress)
        found._save()
        return found

    @classmethod
    def resume(cls, target: Target, work: Path) -> "Rebase":
        """Read the rebase of ``target`` that is under way in ``work``; PatchError if none is."""
        file = work / "progress.json"
        progress = Progress.load(file) if file.is_file() else None
        if progress is None or progress.target != target.name:
            raise PatchError(
                f"{work} has no rebase of {target.name} under way: start one with --to."
            )
        return cls(target, work, progress)

    @property
    def tree(self) -> Path:
        """The scratch git tree."""
        return self.work / "tree"

    def carry_on(self) -> Stopped | None:
        """Pick the patches that are left; returns at the first that does not merge."""
        if self.progress.stopped:
            self._take_solution()
        for patch, commit in self._left():
            stopped = self._pick(patch, commit)
            if stopped is not None:
                return stopped
        return None

    def skip(self, stopped: Stopped) -> None:
        """Go on without the patch that stopped: to see what else would conflict."""
        git(self.tree, "cherry-pick", "--skip")
        self._done(stopped.patch, Outcome.CONFLICT)

    def finish(self) -> Series:
        """Export, check on the released files, write the series and remove the work.

        PatchError, with nothing written, if the result is no series in our form, does not apply
        strictly, or is no valid Python.
        """
        target, version = self.target, self.progress.version
        staged = replace(target, series_dir=self.work / "series")
        series = export_series(staged, version, self.tree, BASE)
        _check(series, {path: file_at(self.tree, BASE, path) for path in series.paths})
        files = series_files(staged, version)
        write_series_files(target, version, {n: f.read_bytes() for n, f in files.items()})
        record_release(target, version, Release(self.progress.file, self.progress.sha256))
        shutil.rmtree(self.work)
        return load_series(target, version)

    def lost_hooks(self, series: Series) -> list[str]:
        """Hooks that the old series calls and the new one does not."""
        old = load_series(self.target, self.progress.source)
        return sorted({*old.hooks} - {*series.hooks})

    def _left(self) -> Iterator[tuple[Patch, str]]:
        patches = load_series(self.target, self.progress.source).patches
        for patch, commit in zip(patches, patch_commits(self.tree), strict=True):
            if patch.name not in self.progress.outcomes:
                yield patch, commit

    def _head(self) -> str:
        return git_lines(self.tree, "rev-parse", "HEAD")[0]

    def _picking(self) -> bool:
        run = attempt(self.tree, "rev-parse", "--verify", "--quiet", "CHERRY_PICK_HEAD")
        return run.returncode == 0

    def _pick(self, patch: Patch, commit: str) -> Stopped | None:
        # What a killed run has left of this pick goes first.
        git(self.tree, "cherry-pick", "--quit")
        git(self.tree, "reset", "--quiet", "--hard", self.progress.head)
        run = attempt(self.tree, "-c", "merge.conflictStyle=diff3", "cherry-pick", commit)
        if run.returncode == 0:
            after = parse_patch(patch.name, commit_as_patch(self.tree, "HEAD"))
            self._done(patch, merged(patch, after))
            return None
        if conflicts := find_conflicts(self.tree, patch, f"{commit}^"):
            return self._report(patch, conflicts)
        if not self._picking() or git(self.tree, "status", "--porcelain"):
            raise PatchError(f"git says: {run.stderr.decode(errors='replace').strip()}.")
        # Nothing is left to commit: the release has the change itself.
        git(self.tree, "cherry-pick", "--skip")
        self._done(patch, Outcome.DROPPED)
        return None

    def _report(self, patch: Patch, conflicts: list[Conflict]) -> Stopped:
        then = f"python -m patches rebase {self.target.name} --continue --work {self.work}"
        report = self.work / "conflict.md"
        report.write_text(as_markdown(patch, conflicts, self.tree, then), "utf-8")
        report.with_suffix(".json").write_text(as_json(patch, conflicts), "utf-8")
        self.progress.stopped = True
        self._save()
        return Stopped(patch, conflicts, report)

    def _take_solution(self) -> None:
        """Commit what the user has made of the patch that stopped, or see that it is dropped."""
        patch, _commit = next(self._left())
        if self._picking():
            self._stage()
            changed = bool(git_lines(self.tree, "diff", "--cached", "--name-only"))
            git(self.tree, "cherry-pick", "--continue" if changed else "--skip")
        solved = self._head() != self.progress.head
        self._done(patch, Outcome.SOLVED if solved else Outcome.DROPPED)

    def _stage(self) -> None:
        for path in git_lines(self.tree, "diff", "--name-only", "--diff-filter=U"):
            if (self.tree / path).exists() and file_at(self.tree, "HEAD", path) is None:
                raise PatchError(
                    f"{self.progress.version} has no {path}: put its call where the code is now, "
                    f"then run `git -C {self.tree} rm {path}`."
                )
        for path in git_lines(self.tree, "diff", "--name-only", "HEAD"):
            file = self.tree / path
            if file.exists() and has_markers(file):
                raise PatchError(f"{file} still has conflict markers: solve them first.")
        git(self.tree, "add", "--update")

    def _done(self, patch: Patch, outcome: Outcome) -> None:
        self.progress.outcomes[patch.name] = outcome
        self.progress.head = self._head()
        self.progress.stopped = False
        self._save()
        for report in self.work.glob("conflict.*"):
            report.unlink()

    def _save(self) -> None:
        self.progress.save(self.work / "progress.json")


def _check(series: Series, released: dict[str, bytes | None]) -> None:
    """Apply a new series as strictly as `apply` will, and compile what comes out."""
    for path, content in series.results(released).items():
        try:
            compile(content, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise PatchError(
                f"{path} is no valid Python after the series, line {error.lineno}: fix the patch "
                "that edits it."
            ) from None
