"""Apply and revert: the only code that writes into an upstream package.

A file is replaced as a whole by ``os.replace``, after the journal with its pristine content is on
disk, so at any moment every file is either pristine or patched and the journal can tell which.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from patches.apply.journal import FileHashes, Journal, Manifest, sync_directory, write_durably
from patches.apply.state import Inspection, State, Where, inspect, require_upstream, series_for
from patches.apply.upstream import Upstream
from patches.config import Target
from patches.errors import PatchError, file_errors_explained
from patches.format.series import Series

LOCK_PATIENCE_S = 30.0

Change = Callable[[Target, Where], bool]


def apply(target: Target, where: Where = None) -> bool:
    """Patch the target where it lies. True if files changed, False if they were patched already.

    An interrupted run and an older series are undone first. PatchError, with nothing changed, on
    any other version, on foreign edits, and on a series that does not apply.
    """
    upstream = require_upstream(target, where)
    with _sole_editor(target, upstream):
        series = series_for(target, upstream)
        found = inspect(target, upstream, series)
        if found.state is State.PATCHED:
            return False
        if series is None or found.state is State.FOREIGN:
            raise PatchError(found.remedy())
        pristine = found.pristine_content(series.paths)
        patched = series.results(pristine)
        _restore(found)
        _patch(found, series, pristine, patched)
        return True


def revert(target: Target, where: Where = None) -> bool:
    """Restore the released bytes. True if files changed, False if there was nothing to restore.

    Needs no series, only the journal. PatchError, with nothing changed, on foreign edits.
    """
    upstream = require_upstream(target, where)
    with _sole_editor(target, upstream):
        found = inspect(target, upstream, series=None)
        if found.state is State.FOREIGN:
            raise PatchError(found.remedy())
        _restore(found)
        return bool(found.patched)


@contextmanager
def _sole_editor(target: Target, upstream: Upstream) -> Iterator[None]:
    """Hold a lock on a file of the release, which exists anyway.

    It is opened for writing, though never written, because NFS locks need it.
    """
    with file_errors_explained(), upstream.lock.open("r+b") as file:
        _lock(file.fileno(), target)
        yield


def _lock(descriptor: int, target: Target) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise PatchError(
                    f"another `python -m patches` is at work on {target.name}: "
                    "wait until it has ended, then run the command again."
                ) from None
            time.sleep(0.05)


def _patch(
    found: Inspection,
    series: Series,
    pristine: Mapping[str, bytes | None],
    patched: Mapping[str, bytes],
) -> None:
    upstream, digest = found.upstream, found.upstream.digest
    hashes = {p: FileHashes(found.released[p], digest(c)) for p, c in patched.items()}
    try:
        manifest = Manifest(series.digest, hashes, upstream.version, upstream.stated)
        found.journal.save(manifest, pristine)
        for path, content in patched.items():
            _replace(upstream.site / path, content, found.journal)
    except BaseException:
        # Not only errors: Ctrl-C must leave the package as it was, too.
        _restore(inspect(found.target, upstream, series))
        raise


def _restore(found: Inspection) -> None:
    """Bring every patched file back and drop the journal; harmless if there is nothing to do."""
    site, journal = found.upstream.site, found.journal
    # Every saved file is read before the first one is put back: a damaged one changes nothing.
    for path, content in found.pristine_content(found.patched).items():
        if content is not None:
            _replace(site / path, content, journal)
    for path, hashes in found.reversible.items():
        if hashes.pristine is None:
            _remove_added(site / path, site / found.target.package)
    journal.remove()


def _replace(file: Path, content: bytes, journal: Journal) -> None:
    """Put ``content`` in the place of ``file`` in one step: same mode and owner, newer time."""
    write_durably(journal.staged, content)
    with suppress(FileNotFoundError):
        before = file.stat()
        journal.staged.chmod(before.st_mode)
        with suppress(PermissionError):
            os.chown(journal.staged, before.st_uid, before.st_gid)
        # Python trusts a .pyc whose source has the recorded whole second and size.
        newer_ns = max(time.time_ns(), before.st_mtime_ns + 1_000_000_000)
        os.utime(journal.staged, ns=(newer_ns, newer_ns))
    file.parent.mkdir(parents=True, exist_ok=True)
    journal.staged.replace(file)
    sync_directory(file.parent)


def _remove_added(file: Path, package: Path) -> None:
    """Remove a file that the series added, its byte code and the directories it leaves empty."""
    file.unlink(missing_ok=True)
    cache = file.parent / "__pycache__"
    for compiled in cache.glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    for directory in (cache, *file.parents):
        if directory == package:
            break
        try:
            directory.rmdir()
        except FileNotFoundError:
            continue
        except OSError:  # it has other files
            break
    sync_directory(package)
