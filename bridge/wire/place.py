"""Bytes of a client's memory that a message names in the place of a frame.

`bridge.transport.shared_memory` says how they are reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.wire.fields import Fields

MAX_REGION_BYTES = 128 << 20
MAX_STAMP = (1 << 64) - 1
_MAX_NUMBER = 1 << 31
_KEY_CHARS = 32
_FIELDS = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a region that a client lends.

    A bridge of the same machine finds the region as descriptor ``fd`` of process ``pid``, and
    knows by its ``key`` that it is the one that is meant.
    """

    pid: int
    fd: int
    key: str
    offset: int
    nbytes: int

    def body(self) -> dict[str, Any]:
        """Return the fields as a map."""
        return {
            "pid": self.pid,
            "fd": self.fd,
            "key": self.key,
            "offset": self.offset,
            "nbytes": self.nbytes,
        }


def parsed_place(fields: Fields) -> Place | None:
    """Return the place that a header names, None if it names none; raise CorruptMessage."""
    if fields.body.get("place") is None:
        return None
    place = Fields(fields.mapping("place", _FIELDS))
    return Place(
        place.integer("pid", 1, _MAX_NUMBER),
        place.integer("fd", 0, _MAX_NUMBER),
        place.text("key", _KEY_CHARS),
        place.integer("offset", 0, MAX_REGION_BYTES),
        place.integer("nbytes", 1, MAX_REGION_BYTES),
    )
