"""Socket buffers for two processes of one machine.

Linux lets a TCP buffer grow with the traffic to several MiB, to keep a network busy. A loopback
connection has nothing in flight: bytes that wait in a large buffer only leave the CPU caches before
they are read. The buffers of network sockets are not changed.
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
    """Whether a tcp endpoint is certainly on this machine; names are not looked up."""
    match = _HOST.fullmatch(endpoint)
    if match is None:
        return False
    try:
        return ipaddress.ip_address(match["host"]).is_loopback
    except ValueError:
        return match["host"] == "localhost"
