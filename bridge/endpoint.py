"""Where a bridge may listen."""

from __future__ import annotations

import ipaddress
import re

from bridge.errors import TraceError

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(?P<port>\d+|\*)")


class InvalidEndpoint(TraceError):
    """The endpoint cannot be used."""


class EndpointInUse(TraceError):
    """Another process listens on the endpoint."""


def checked_endpoint(endpoint: str) -> str:
    """Return a loopback endpoint as ZeroMQ wants it; port 0 becomes "*" (any free port).

    Raises:
        InvalidEndpoint: not tcp://HOST:PORT, or HOST is not a loopback address. Records are neither
            encrypted nor authenticated yet, so other machines must not reach them.
    """
    match = _TCP.fullmatch(endpoint)
    if match is None or (match["port"].isdigit() and int(match["port"]) > 65535):
        raise InvalidEndpoint(
            f"{endpoint!r} is not an endpoint; write it as tcp://127.0.0.1:PORT (PORT 0: any free)"
        )
    host = "127.0.0.1" if match["host"] == "localhost" else match["host"]
    if not _is_loopback(host):
        raise InvalidEndpoint(
            f"{endpoint} is not a loopback address and the bridge does not encrypt yet; "
            "use tcp://127.0.0.1:PORT and an SSH tunnel to reach it from elsewhere"
        )
    port = "*" if match["port"] in ("*", "0") else match["port"]
    return f"tcp://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
