"""Where a bridge may listen."""

from __future__ import annotations

import ipaddress
import re
import socket
from enum import Enum

from bridge.errors import TraceError

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(?P<port>\d+|\*)")


class InvalidEndpoint(TraceError):
    """The endpoint cannot be used."""


class EndpointInUse(TraceError):
    """Another process listens on the endpoint."""


class Reach(Enum):
    """From where a bridge may be reached."""

    LOOPBACK = "loopback"
    ANYWHERE = "anywhere"


def checked_endpoint(endpoint: str, reach: Reach = Reach.LOOPBACK) -> str:
    """Return an endpoint to bind, its host name resolved; port 0 becomes "*" (any free port).

    Raises:
        InvalidEndpoint: not tcp://HOST:PORT, or HOST cannot be resolved or is not a loopback
            address where only those may be.
    """
    match = _TCP.fullmatch(endpoint)
    if match is None or (match["port"].isdigit() and int(match["port"]) > 65535):
        raise InvalidEndpoint(
            f"{endpoint!r} is not an endpoint; write it as tcp://127.0.0.1:PORT (PORT 0: any free)"
        )
    address = _address(match["host"], endpoint)
    if not address.is_loopback and reach is Reach.LOOPBACK:
        raise InvalidEndpoint(
            f"{endpoint} is not a loopback address, so other machines could read and write records;"
            " make keys (python -m bridge keys DIR rollout trainer) and serve with --keys "
            "DIR/bridge.keys, use tcp://127.0.0.1:PORT, or type --insecure to go without"
        )
    port = "*" if match["port"] in ("*", "0") else match["port"]
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"tcp://{host}:{port}"


def _address(host: str, endpoint: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a host; what is bound is then what was checked."""
    if host == "*":
        return ipaddress.IPv4Address("0.0.0.0")
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidEndpoint(
            f"{host} in {endpoint} is no address of this machine ({error.strerror}); "
            "write it as tcp://127.0.0.1:PORT, or with --keys as tcp://0.0.0.0:PORT"
        ) from error
    return ipaddress.ip_address(found[0][4][0])
