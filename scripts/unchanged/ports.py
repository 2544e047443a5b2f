"""A free port of this host."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A loopback port nobody holds right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
