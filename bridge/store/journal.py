"""Journal format: one message per value, with its checksums from the wire."""

from __future__ import annotations

import msgpack

from bridge.errors import CorruptMessage
from bridge.wire import Message, decode, encode

STORE_SCHEMA = 4
"""Schema of the messages in a journal; it stays where only the wire's schema changes."""


def pack(message: Message, seq: int) -> bytes:
    """Return the journal bytes of a message."""
    packed: bytes = msgpack.packb([bytes(frame) for frame in encode(message, seq, STORE_SCHEMA)])
    return packed


def unpack(header: bytes) -> tuple[Message, int]:
    """Return (message, seq); raise CorruptMessage or SchemaMismatch on altered bytes."""
    try:
        frames = msgpack.unpackb(header)
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptMessage(f"a journal entry is not readable ({error})") from error
    if not isinstance(frames, list) or not all(isinstance(frame, bytes) for frame in frames):
        raise CorruptMessage("a journal entry is not a list of frames")
    return decode(frames, STORE_SCHEMA)
