"""A person who waits at a terminal is told for what, and for how long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SILENT_S = 1.0


@contextmanager
def waiting_for(what: str, timeout_s: float) -> Iterator[None]:
    """Say once on stderr what is waited for, if what the context does takes over a second."""
    sentence = f"waiting up to {timeout_s:g} s for {what} (Ctrl-C ends it)\n"
    timer = threading.Timer(_SILENT_S, sys.stderr.write, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
