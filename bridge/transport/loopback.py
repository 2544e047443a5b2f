"""Socket buffers for two processes of one machine.

Linux lets a TCP buffer grow with the traffic, to several MiB, which a network needs to be full. On
loopback nothing is on its way: what waits in a large buffer only leaves the caches of the CPU
before it is read. The buffers of a network socket are left alone.
"""

from __future__ import annotations

import ipaddress
import re

import zmq

_BUFFER_BYTES = 1 << 20
_HOST = re.compile(r"tcp://\[?(?P<host>[^\[\]]+?)\]?:(\d+|\*)")


def bound_buffers(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Give a socket that will bind or connect to a loopback endpoint buffers of a fixed size."""
    if is_loopback(endpoint):
        socket.setsockopt(zmq.SNDBUF, _BUFFER_BYTES)
        socket.setsockopt(zmq.RCVBUF, _BUFFER_BYTES)


def is_loopback(endpoint: str) -> bool:
    """Whether a tcp endpoint is surely of this machine alone; names are not looked up."""
    match = _HOST.fullmatch(endpoint)
    if match is None:
        return False
    try:
        return ipaddress.ip_address(match["host"]).is_loopback
    except ValueError:
        return match["host"] == "localhost"
