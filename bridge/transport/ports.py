"""Reserve a port now for a server that binds it seconds later."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def held_port() -> int:
    """Return a loopback port that is reserved until this process ends.

    A socket of this process stays bound to the port and never listens. Linux then assigns the port
    neither to a bind of port 0 nor to an outgoing connection. A server that sets SO_REUSEADDR, as
    practically every server does, can still listen there.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _HELD.append(holder)
    return int(holder.getsockname()[1])
