"""Frames of one message: a sealed header, then raw payload frames.

First frame: 20-byte preamble (magic, schema version, reserved, header length, header checksum),
then a msgpack map {"type", "seq", "sums", "body"}; "sums" has the checksum of every payload frame.
The schema version precedes everything that a later schema may change, so an old reader can still
name the version. Checksums are XXH3 (64 bits): one call per frame, far faster than memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest as checksum

from bridge.errors import CorruptMessage, SchemaMismatch
from bridge.wire.fields import MAX_LIST_ITEMS, MAX_MAP_ITEMS

SCHEMA_VERSION = 5
MAX_HEADER_BYTES = 16 << 20
MAX_SEQ = 1 << 62
NO_SEQ = -1
MAX_FRAMES = 8
# The largest are the row numbers of the longest trajectory. ZeroMQ refuses larger frames unread.
MAX_FRAME_BYTES = 32 << 20
MAX_MESSAGE_BYTES = 64 << 20
# Lists and maps in one header: a page of trajectory summaries has two for each.
MAX_CONTAINERS = 1 << 14

Buffer = bytes | memoryview

_MAGIC = b"TRCE"
_PREAMBLE = struct.Struct("<4sHHIQ")


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message whose header and frames are intact."""

    kind: str
    seq: int
    body: dict[str, Any]
    frames: tuple[memoryview, ...]


def seal(
    kind: str,
    seq: int,
    body: dict[str, Any],
    frames: Sequence[Buffer],
    version: int = SCHEMA_VERSION,
) -> list[Buffer]:
    """Return the frames to send; payload frames are passed on, not copied."""
    sums = [checksum(frame) for frame in frames]
    header: bytes = msgpack.packb({"type": kind, "seq": seq, "sums": sums, "body": body})
    if len(header) > MAX_HEADER_BYTES:
        raise CorruptMessage(
            f"a {kind} header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}; "
            "send fewer names in one message"
        )
    preamble = _PREAMBLE.pack(_MAGIC, version, 0, len(header), checksum(header))
    return [preamble + header, *frames]


def unseal(frames: Sequence[Buffer], version: int = SCHEMA_VERSION) -> Envelope:
    """Check version, sizes and checksums; raise SchemaMismatch or CorruptMessage."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise CorruptMessage(f"a message has 1 to {MAX_FRAMES} frames, this one {len(frames)}")
    head, *payload = (memoryview(frame) for frame in frames)
    if any(frame.nbytes > MAX_FRAME_BYTES for frame in payload):
        raise CorruptMessage(f"a frame is over the limit of {MAX_FRAME_BYTES} bytes")
    if sum(frame.nbytes for frame in payload) > MAX_MESSAGE_BYTES:
        raise CorruptMessage(f"a message is over the limit of {MAX_MESSAGE_BYTES} bytes")
    header = _open_header(head, version)
    if len(payload) != len(header["sums"]):
        raise CorruptMessage("the message lacks frames that its header announces; resend it")
    for number, (frame, expected) in enumerate(zip(payload, header["sums"], strict=True), start=1):
        if checksum(frame) != expected:
            raise CorruptMessage(f"frame {number} of the message fails its checksum; resend it")
    return Envelope(header["type"], header["seq"], header["body"], tuple(payload))


def _open_header(frame: memoryview, version: int) -> dict[str, Any]:
    if frame.nbytes < _PREAMBLE.size or bytes(frame[:4]) != _MAGIC:
        raise CorruptMessage(
            "this is not a bridge message; connect only sglang-trace processes to the endpoint"
        )
    _, found, reserved, length, expected = _PREAMBLE.unpack(frame[: _PREAMBLE.size])
    if found != version:
        raise SchemaMismatch(
            f"the message has wire schema {found} and this process speaks {version}; "
            "install the same sglang-trace version on both sides"
        )
    packed = frame[_PREAMBLE.size :]
    if reserved != 0 or length != packed.nbytes or length > MAX_HEADER_BYTES:
        raise CorruptMessage(
            f"the message header has {packed.nbytes} bytes where {length} are announced; resend it"
        )
    if checksum(packed) != expected:
        raise CorruptMessage("the message header fails its checksum; resend it")
    return _checked_header(packed)


def _checked_header(packed: memoryview) -> dict[str, Any]:
    counted = _Counted()
    try:
        # msgpack allocates lists of the announced length, nested up to a thousand deep, before it
        # reads the items. No header has bytes or extensions.
        header = msgpack.unpackb(
            packed,
            max_array_len=MAX_LIST_ITEMS,
            max_map_len=MAX_MAP_ITEMS,
            max_bin_len=0,
            max_ext_len=0,
            list_hook=counted,
            object_hook=counted,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptMessage(f"the message header is not a msgpack map ({error})") from error
    expected = {"type": str, "seq": int, "sums": list, "body": dict}
    if not isinstance(header, dict) or any(
        type(header.get(name)) is not kind for name, kind in expected.items()
    ):
        raise CorruptMessage("the message header lacks one of type, seq, sums and body")
    if not NO_SEQ <= header["seq"] <= MAX_SEQ:
        raise CorruptMessage("the message's sequence number is out of range; count from 0")
    return header


class _Counted:
    """Refuses a header of too many lists and maps: an empty one of a byte takes 64 in memory."""

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def __call__(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise CorruptMessage(f"the message header has over {MAX_CONTAINERS} lists and maps")
        return container
