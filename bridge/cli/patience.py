"""A message for a user who waits at a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SILENT_S = 1.0


@contextmanager
def waiting_for(what: str, timeout_s: float) -> Iterator[None]:
    """Print once to stderr what the command waits for, if the context takes over a second."""
    message = f"waiting up to {timeout_s:g} s for {what} (Ctrl-C ends it)\n"
    timer = threading.Timer(_SILENT_S, sys.stderr.write, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
