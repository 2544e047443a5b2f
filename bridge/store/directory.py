"""The directory of a store: one daemon uses it, and no other user can read or change its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from bridge.errors import TraceError
from bridge.wire.envelope import Buffer

LOCK_FILE = "daemon.lock"
DATA_FILE = "data.mdb"
READERS_FILE = "lock.mdb"
RESERVE_FILE = "ballast"
CHECKPOINT_FILE = "index"
POOL_FILE = "pool"
NEW = "new."  # prefix of a file until it is complete
_REPLACED = (DATA_FILE, CHECKPOINT_FILE, POOL_FILE)
_OURS = {
    *(LOCK_FILE, DATA_FILE, READERS_FILE, RESERVE_FILE, CHECKPOINT_FILE, POOL_FILE),
    *(NEW + name for name in _REPLACED),
}
_READERS_BYTES = 8192  # the size that LMDB gives it
_ONLY_OWNER = 0o700
_OTHERS = 0o077
_OTHERS_WRITE = 0o022


class StoreBusy(TraceError):
    """Another daemon writes to the directory."""


class CorruptStore(TraceError):
    """The directory has no readable store."""


def locked(directory: Path) -> int:
    """Lock the directory for this process; the kernel releases the lock when the process ends.

    The function restricts the directory and its files to this user, also those of an earlier
    version.

    Raises:
        StoreBusy: another daemon has the lock.
        CorruptStore: the directory is not writable, or other users can create files in it.
    """
    try:
        directory.mkdir(mode=_ONLY_OWNER, parents=True, exist_ok=True)
        _close_to_others(directory)
        _replace_if_open_to_others(directory / LOCK_FILE)
        descriptor = private_file(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise CorruptStore(
            f"cannot use {directory} as a store ({error.strerror}); choose another --dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreBusy(
            f"another bridge daemon serves {directory}; stop it or choose another --dir"
        ) from error
    return descriptor


def prepare_files(directory: Path) -> None:
    """Make LMDB's files this user's only before LMDB opens them, which follows links.

    The table of readers gets its blocks now: LMDB writes to it through memory, where a full disk
    would end the process.

    Raises:
        OSError: there is no room, or a file is a link or somebody else's.
    """
    data = directory / DATA_FILE
    if data.is_symlink() or data.exists():
        os.close(private_file(data, os.O_RDWR))
    descriptor = private_file(directory / READERS_FILE, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, _READERS_BYTES)
    finally:
        os.close(descriptor)


def private_file(path: Path, flags: int) -> int:
    """Open a regular file of this user that nobody else can open; raise OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, f"{path.name} is not a file")
        if found.st_uid != os.geteuid() and os.geteuid() != 0:
            raise OSError(0, f"{path.name} belongs to another user")
        if found.st_mode & _OTHERS:
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def replace_file(path: Path, content: Iterable[Buffer]) -> None:
    """Replace a private file atomically, also across a power cut; raise OSError."""
    new = path.with_name(NEW + path.name)
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(private_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as stream:
            stream.writelines(content)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


def sync_names(directory: Path) -> None:
    """Make renames and deletions in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _close_to_others(directory: Path) -> None:
    """Restrict a directory that has only store files; refuse one in which others can write."""
    is_ours = {entry.name for entry in os.scandir(directory)} <= _OURS
    if is_ours and directory.stat().st_mode & _OTHERS:
        with contextlib.suppress(
            PermissionError
        ):  # another user owns it; the check below refuses it
            directory.chmod(_ONLY_OWNER)
    if directory.stat().st_mode & _OTHERS_WRITE:
        raise CorruptStore(
            f"other users can make files in {directory}; choose a directory of its own for the "
            f"bridge, such as {directory / 'bridge'}"
        )


def _replace_if_open_to_others(lock: Path) -> None:
    """Delete a lock file that other users can open, because one of them may have locked it.

    Earlier versions wrote such files. Their store has another schema, so the daemon refuses it.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(lock.lstat().st_mode) and lock.lstat().st_mode & _OTHERS:
            lock.unlink()


class ReserveFile:
    """A file that reserves disk space, so that the store can delete records on a full disk."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._file = directory / RESERVE_FILE
        self._nbytes = nbytes

    def load(self) -> None:
        """Reserve the space if the disk has it."""
        try:
            descriptor = private_file(self._file, os.O_RDWR | os.O_CREAT)
            try:
                os.posix_fallocate(descriptor, 0, self._nbytes)
            finally:
                os.close(descriptor)
        except OSError:
            self.unload()

    def unload(self) -> bool:
        """Release the space; return False if none was reserved."""
        try:
            self._file.unlink()
        except OSError:
            return False  # no such file, or the file system is read-only
        return True
