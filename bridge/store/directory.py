"""A store's directory: one daemon at a time, and a little room kept back for a full disk."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from bridge.errors import TraceError

_MOST_BALLAST = 1 << 20


class StoreBusy(TraceError):
    """Another daemon writes to the directory."""


class CorruptStore(TraceError):
    """The directory does not hold a readable store."""


def locked(directory: Path) -> int:
    """Hold the directory for this process; the kernel lets go when the process ends.

    Raises:
        StoreBusy: another daemon holds it.
        CorruptStore: it cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
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


class Ballast:
    """A file thrown overboard when the disk is full, so that records can be deleted even then."""

    def __init__(self, directory: Path, most: int) -> None:
        self._file = directory / "ballast"
        self.nbytes = min(most, _MOST_BALLAST)

    def load(self) -> None:
        """Take the room if it is there."""
        try:
            with self._file.open("a+b") as file:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
        except OSError:
            self.unload()

    def unload(self) -> None:
        """Give the room back to the file system."""
        self._file.unlink(missing_ok=True)
