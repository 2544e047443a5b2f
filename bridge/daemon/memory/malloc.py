"""Malloc tuning: glibc keeps freed memory instead of returning it to the kernel.

The daemon allocates and frees frames of a few MiB all the time. By default glibc unmaps most of
them. The kernel then clears every page of every new frame, which costs more than receiving it. The
memory limit also limits the kept memory.
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
    """Tune malloc; call it before the first thread starts. Without glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)  # other arenas are unmapped whole when they are empty
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
