"""Scratch space on disk that is gone with the process, however it ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from bridge.store.directory import CorruptStore
from bridge.store.disk.lmdb_store import DiskStore

# Larger than memory is the point, and /tmp is often a file system in memory.
_LARGE_TEMPORARY_FILES = "/var/tmp"


def scratch_store(parent: Path | None, limit_bytes: int) -> DiskStore:
    """Return a store whose files have no name any more, so that the kernel frees them at the end.

    Raises:
        CorruptStore: nothing can be made under ``parent``.
    """
    place = parent or Path(os.environ.get("TMPDIR", _LARGE_TEMPORARY_FILES))
    try:
        directory = Path(tempfile.mkdtemp(prefix="bridge-", dir=place))
    except OSError as error:
        raise CorruptStore(
            f"cannot make scratch space in {place} ({error.strerror}); choose another --spill"
        ) from error
    try:
        return DiskStore(directory, limit_bytes, sync=False)
    finally:
        shutil.rmtree(directory)
