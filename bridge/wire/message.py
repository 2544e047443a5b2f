"""What every message can do: name its kind, give its frames, and be parsed from an envelope."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

from bridge.errors import CorruptMessage
from bridge.wire.envelope import Buffer, Envelope


class Message(Protocol):
    """A dataclass that travels in one envelope."""

    KIND: ClassVar[str]

    def body(self) -> dict[str, Any]:
        """Return the msgpack-able small fields."""

    def frames(self) -> list[Buffer]:
        """Return the payload frames."""

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build the message from an intact envelope; raise CorruptMessage."""


class HeaderOnly:
    """A message without payload frames."""

    def frames(self) -> list[Buffer]:
        """Return no frames."""
        return []


class Signal(HeaderOnly):
    """A message that says everything by its kind."""

    def body(self) -> dict[str, Any]:
        """Return no fields."""
        return {}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        return cls()


def frames_of(envelope: Envelope, count: int) -> tuple[memoryview, ...]:
    """Return the frames, of which there must be exactly ``count``."""
    if len(envelope.frames) != count:
        raise CorruptMessage(f"a {envelope.kind} message with {len(envelope.frames)} frames")
    return envelope.frames
