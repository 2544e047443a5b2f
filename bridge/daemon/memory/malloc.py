"""Keep freed memory for the next records instead of returning it to the kernel.

Frames of a few MiB come and go for as long as the daemon lives, and glibc would unmap most of them:
the kernel then clears every page of every record, which costs more than receiving it. The memory
limit bounds what is kept.
"""

from __future__ import annotations

import ctypes

# Names and numbers of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_INT = (1 << 31) - 1
_LARGEST_MMAP_THRESHOLD = 32 << 20


def tune_malloc() -> None:
    """Set it up, before the first thread is started; without glibc do nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)  # other arenas are unmapped whole when they are empty
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
