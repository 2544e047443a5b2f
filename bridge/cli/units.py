"""Byte counts with binary units."""

from __future__ import annotations

import re

from bridge.errors import TraceError

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]iB)?")


class InvalidSize(TraceError):
    """A text is not a byte count."""


def parse_size(text: str) -> int:
    """Return bytes for "64GiB", "512 MiB" or "1048576"; raise InvalidSize otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise InvalidSize(f"{text!r} is not a size; write it as 64GiB, 512MiB or a count of bytes")
    return int(match[1]) * _UNITS[match[2] or ""]


def format_size(nbytes: int) -> str:
    """Return bytes with a binary unit and one decimal."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
