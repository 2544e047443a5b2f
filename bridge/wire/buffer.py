"""Handles of buffers in a client's shared memory, sent in place of a payload frame.

`bridge.transport.shared_memory` says how the daemon maps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.wire.fields import Fields

MAX_SEGMENT_BYTES = 128 << 20
MAX_STAMP = (1 << 64) - 1
_MAX_NUMBER = 1 << 31
_KEY_CHARS = 32
_FIELDS = 5


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """A range of bytes in a client's shared-memory segment.

    A daemon on the same machine opens the segment as descriptor ``fd`` of process ``pid`` and
    verifies it by its random ``key``.
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


def parsed_buffer(fields: Fields) -> BufferHandle | None:
    """Return the buffer handle in a header, None if it has none; raise CorruptMessage."""
    if fields.body.get("place") is None:
        return None
    handle = Fields(fields.mapping("place", _FIELDS))
    return BufferHandle(
        handle.integer("pid", 1, _MAX_NUMBER),
        handle.integer("fd", 0, _MAX_NUMBER),
        handle.text("key", _KEY_CHARS),
        handle.integer("offset", 0, MAX_SEGMENT_BYTES),
        handle.integer("nbytes", 1, MAX_SEGMENT_BYTES),
    )
