"""Limits the mapped pages of the store's files.

These pages are the kernel's cache, and it takes them back when it needs memory. Until then they
count as memory of this process, for example in a control group.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import time
from contextlib import suppress
from pathlib import Path

from bridge.store.directory import DATA_FILE

_PERIOD_S = 0.01
_DONTNEED = 4  # MADV_DONTNEED of Linux
_STATM, _MAPS = Path("/proc/self/statm"), Path("/proc/self/maps")
_MAPPING = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) r\S+ .*/" + re.escape(DATA_FILE) + r"( \(deleted\))?$"
)


class MappedFiles:
    """Keeps the mapped pages below ``max_bytes`` more than at the start."""

    def __init__(self, max_bytes: int) -> None:
        self._ticked_at = time.monotonic()
        self._max_bytes = max_bytes + _shared_bytes()

    def tick(self, shm_bytes: int) -> None:
        """Release the files' pages if there are too many; ``shm_bytes`` of clients do not count."""
        now = time.monotonic()
        if now - self._ticked_at >= _PERIOD_S:
            self._ticked_at = now
            if _shared_bytes() > self._max_bytes + shm_bytes:
                release_pages()


def release_pages() -> None:
    """Release all pages of the store's files; a later read maps them again."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with suppress(OSError):
        for line in _MAPS.read_text().splitlines():
            found = _MAPPING.match(line)
            if found:
                begin, end = int(found[1], 16), int(found[2], 16)
                madvise(begin, end - begin, _DONTNEED)


def _shared_bytes() -> int:
    """Return the bytes of file and shared pages of this process; 0 without /proc."""
    with suppress(OSError):
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    return 0
