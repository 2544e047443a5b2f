"""What the daemon has read of its store's files through memory maps, and keeps mapped.

Those pages are the kernel's cache: it takes them back when it needs to. But they count as memory of
this process until then, for whoever watches it or limits its group.
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
    """Keeps the mapped pages of files under ``most_bytes`` and what there was in the beginning."""

    def __init__(self, most_bytes: int) -> None:
        self._ticked_at = time.monotonic()
        self._most_bytes = most_bytes + _shared_bytes()

    def tick(self, lent_bytes: int) -> None:
        """Let go of the files' pages if they are too many besides what clients lend."""
        now = time.monotonic()
        if now - self._ticked_at >= _PERIOD_S:
            self._ticked_at = now
            if _shared_bytes() > self._most_bytes + lent_bytes:
                release_pages()


def release_pages() -> None:
    """Let go of all pages of the store's files; what is read again is mapped again."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with suppress(OSError):
        for line in _MAPS.read_text().splitlines():
            found = _MAPPING.match(line)
            if found:
                begin, end = int(found[1], 16), int(found[2], 16)
                madvise(begin, end - begin, _DONTNEED)


def _shared_bytes() -> int:
    """Return the memory of this process that is a file's or others' too; 0 without /proc."""
    with suppress(OSError):
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    return 0
