"""Ports for servers that a process starts: chosen now, bound by the server seconds later."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def held_port() -> int:
    """Return a loopback port that nobody else is given until this process ends.

    A socket of ours stays bound to it and never listens. Linux then gives the port neither to who
    asks for any free one nor to an outgoing connection, and yet lets a server listen there that
    sets SO_REUSEADDR, as practically every server does.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _HELD.append(holder)
    return int(holder.getsockname()[1])
