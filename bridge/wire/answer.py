"""What the daemon answers to everyone: held, refused, alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from bridge.wire.envelope import Envelope
from bridge.wire.fields import Fields
from bridge.wire.message import HeaderOnly, Signal, frames_of


@dataclass(frozen=True, slots=True)
class Ack(HeaderOnly):
    """The store holds the peer's messages with these sequence numbers."""

    KIND: ClassVar[str] = "ack"

    seqs: tuple[int, ...]

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"seqs": list(self.seqs)}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        return cls(Fields(envelope.body).integers("seqs"))


@dataclass(frozen=True, slots=True)
class Error(HeaderOnly):
    """The message with this envelope's seq was refused; ``code`` is the name of an error class."""

    KIND: ClassVar[str] = "error"

    code: str
    sentence: str

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"code": self.code, "sentence": self.sentence}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        return cls(fields.name("code"), fields.text("sentence", limit=1 << 14))


@dataclass(frozen=True, slots=True)
class Ping(Signal):
    """Ask whether the daemon lives."""

    KIND: ClassVar[str] = "ping"


@dataclass(frozen=True, slots=True)
class Pong(Signal):
    """The daemon lives."""

    KIND: ClassVar[str] = "pong"
