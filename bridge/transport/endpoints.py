"""Endpoints: where a bridge listens, and where its clients connect."""

from __future__ import annotations

import ipaddress
import re
import socket
from enum import Enum

from bridge.errors import TraceError

DEFAULT_PORT = 7707
DEFAULT_ENDPOINT = f"tcp://127.0.0.1:{DEFAULT_PORT}"

_TCP = re.compile(
    r"tcp://(?P<host>\[[0-9a-fA-F:.]+(%[\w.-]+)?\]|[\w.-]+|\*):(?P<port>\d{1,5}|\*)", re.ASCII
)
_ALMOST = re.compile(r"(?:\w+:/*)?(?P<rest>[\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5})/?", re.ASCII)
_DIGITS_AND_DOTS = re.compile(r"[\d.]+", re.ASCII)
_MAX_PORT = 65535


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
    match = _parts(endpoint)
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


def dialled_endpoint(endpoint: str) -> str:
    """Return an endpoint to connect to, as it is; the name of a host is not looked up here.

    Raises:
        InvalidEndpoint: not tcp://HOST:PORT of one host, with a port from 1 to 65535.
    """
    match = _parts(endpoint)
    if match["host"] == "*" or match["port"] in ("*", "0") or not int(match["port"]):
        raise InvalidEndpoint(
            f"{endpoint!r} is where a bridge may listen, not where it is reached; "
            "give its host and the port that it printed when it started"
        )
    return endpoint


def unknown_host(endpoint: str) -> str | None:
    """Return the host of a checked endpoint if nobody knows its address, else None."""
    host = _parts(endpoint)["host"].strip("[]")
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return host
    return None


def _parts(endpoint: str) -> re.Match[str]:
    """Return the match of host and port; raise InvalidEndpoint."""
    match = _TCP.fullmatch(endpoint)
    if match is None or not _is_port(match["port"]) or not _is_host(match["host"]):
        raise InvalidEndpoint(f"{endpoint!r} is not an endpoint; write it as {_better(endpoint)}")
    return match


def _is_port(text: str) -> bool:
    return text == "*" or int(text) <= _MAX_PORT


def _is_host(text: str) -> bool:
    """Whether a host is a name or a valid address; four numbers are never a name."""
    if not text.startswith("[") and _DIGITS_AND_DOTS.fullmatch(text) is None:
        return True
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def _better(endpoint: str) -> str:
    """Return how to write what was meant: what was given if only its beginning is wrong."""
    almost = _ALMOST.fullmatch(endpoint.strip())
    if almost is not None:
        meant = f"tcp://{almost['rest']}"
        match = _TCP.fullmatch(meant)
        if match is not None and _is_port(match["port"]) and _is_host(match["host"]):
            return meant
    return f"tcp://HOST:PORT, such as {DEFAULT_ENDPOINT} or tcp://[::1]:{DEFAULT_PORT}"


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
    except (OSError, UnicodeError) as error:
        raise InvalidEndpoint(
            f"{host} in {endpoint} is no address of this machine ({error}); "
            "write it as tcp://127.0.0.1:PORT, or with --keys as tcp://0.0.0.0:PORT"
        ) from error
    return ipaddress.ip_address(found[0][4][0])
