"""Scratch space on disk that the kernel frees when the process ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from bridge.store.directory import CorruptStore
from bridge.store.disk.lmdb_store import DiskStore

# The scratch space is larger than memory, and /tmp is often a file system in memory.
_LARGE_TEMPORARY_FILES = "/var/tmp"


def scratch_store(parent: Path | None, limit_bytes: int) -> DiskStore:
    """Return a store with deleted files: the kernel frees them when the process ends.

    Raises:
        CorruptStore: ``parent`` is not writable.
    """
    base = parent or Path(os.environ.get("TMPDIR", _LARGE_TEMPORARY_FILES))
    try:
        directory = Path(tempfile.mkdtemp(prefix="bridge-", dir=base))
    except OSError as error:
        raise CorruptStore(
            f"cannot make scratch space in {base} ({error.strerror}); choose another --spill"
        ) from error
    try:
        return DiskStore(directory, limit_bytes, sync=False)
    finally:
        shutil.rmtree(directory)
