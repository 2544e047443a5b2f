"""Handles of buffers in a client's shared memory, sent in place of a payload frame.

`bridge.transport.shared_memory` says how the daemon maps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

MAX_SEGMENT_BYTES = 128 << 20

Offset = Annotated[int, Meta(ge=0, le=MAX_SEGMENT_BYTES)]
# At most 64 bits, which is what a header's integers have.
Stamp = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """A range of bytes in a client's shared-memory segment.

    A daemon on the same machine opens the segment as descriptor ``fd`` of process ``pid`` and
    verifies it by its random ``key``.
    """

    pid: Annotated[int, Meta(ge=1, le=1 << 31)]
    fd: Annotated[int, Meta(ge=0, le=1 << 31)]
    key: Annotated[str, Meta(max_length=32)]
    offset: Offset
    nbytes: Annotated[int, Meta(ge=1, le=MAX_SEGMENT_BYTES)]
