"""The base class of all messages: a msgspec Struct whose arrays are payload frames.

A message's header has its fields but the arrays, and msgspec checks their types and bounds. Fields
of `bridge.wire.record_fields` have a wire form of their own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import msgspec
from numpy.typing import NDArray

from bridge.errors import CorruptMessage
from bridge.wire.envelope import Buffer, Envelope
from bridge.wire.fields import MAX_TRAJECTORY_TOKENS, array, vector, wire_bytes
from bridge.wire.record_fields import RECORD_FIELDS, Pack

Header = TypeVar("Header", bound=msgspec.Struct)


class Message(msgspec.Struct, frozen=True, eq=True):
    """A message in one envelope.

    ``ARRAYS`` are the fields that are frames, with their types on the wire, in the order of the
    frames: vectors of one length, ``MIN_ITEMS`` to ``MAX_ITEMS``.
    """

    KIND: ClassVar[str]
    ARRAYS: ClassVar[dict[str, str]] = {}
    MIN_ITEMS: ClassVar[int] = 1
    MAX_ITEMS: ClassVar[int] = MAX_TRAJECTORY_TOKENS

    def body(self) -> dict[str, Any]:
        """Return the header fields, as msgpack takes them."""
        return {name: pack(getattr(self, name)) for name, pack in _packers(type(self))}

    def frames(self) -> list[Buffer]:
        """Return the payload frames."""
        return [wire_bytes(getattr(self, name), dtype) for name, dtype in self.ARRAYS.items()]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build the message from an intact envelope; raise CorruptMessage or SchemaMismatch."""
        frames = frames_of(envelope, len(cls.ARRAYS))
        return cls.build(envelope.body, cls.arrays(frames))

    @classmethod
    def build(cls, body: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Self:
        """Build the message from header fields and arrays; raises as `parse` does."""
        record: dict[str, Any] = {}
        for name in _record_names(cls):
            record[name] = RECORD_FIELDS[name][1](body, record)
        header = converted(body, _header_type(cls), cls.KIND)
        message = cls(**msgspec.structs.asdict(header), **record, **arrays)
        message.check()
        return message

    @classmethod
    def arrays(cls, frames: tuple[memoryview, ...]) -> dict[str, NDArray[Any]]:
        """View the frames as the arrays of the message."""
        if not frames:
            return {}
        first, *others = zip(cls.ARRAYS.items(), frames, strict=True)
        (name, dtype), frame = first
        values = vector(frame, dtype, cls.MIN_ITEMS, cls.MAX_ITEMS)
        return {name: values} | {
            name: array(frame, dtype, values.shape) for (name, dtype), frame in others
        }

    def check(self) -> None:
        """Raise CorruptMessage if fields of the right types contradict each other."""


def converted(body: dict[str, Any], kind: type[Header], name: str) -> Header:
    """Return header fields as a struct; raise CorruptMessage naming the message and the field."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        field = f"header field {path.rstrip('`')} of a" if path else "the header of a"
        raise CorruptMessage(f"{field} {name} message is not valid ({reason})") from error


def frames_of(envelope: Envelope, count: int) -> tuple[memoryview, ...]:
    """Return the frames; raise CorruptMessage unless there are exactly ``count``."""
    if len(envelope.frames) != count:
        raise CorruptMessage(f"a {envelope.kind} message with {len(envelope.frames)} frames")
    return envelope.frames


@lru_cache(maxsize=64)
def _header_names(kind: type[Message]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name not in kind.ARRAYS)


@lru_cache(maxsize=64)
def _packers(kind: type[Message]) -> tuple[tuple[str, Pack], ...]:
    """Return the header fields with the functions that give their wire forms."""
    plain = (msgspec.to_builtins, None)
    return tuple((name, RECORD_FIELDS.get(name, plain)[0]) for name in _header_names(kind))


@lru_cache(maxsize=64)
def _record_names(kind: type[Message]) -> tuple[str, ...]:
    return tuple(name for name in RECORD_FIELDS if name in kind.__struct_fields__)


@lru_cache(maxsize=64)
def _header_type(kind: type[Message]) -> type[msgspec.Struct]:
    """Return the struct of the header fields that msgspec checks; all are required."""
    hints = get_type_hints(kind, include_extras=True)
    names = [name for name in _header_names(kind) if name not in RECORD_FIELDS]
    return msgspec.defstruct(kind.__name__, [(name, hints[name]) for name in names], frozen=True)
