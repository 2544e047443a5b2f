"""What the daemon answers to everyone: held, refused, alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from bridge.wire.envelope import MAX_SEQ, Envelope
from bridge.wire.fields import Fields
from bridge.wire.message import HeaderOnly, Signal, frames_of

MAX_SENTENCE_CHARS = 4096


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
        return cls(Fields(envelope.body).integers("seqs", 0, MAX_SEQ))


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
        return cls(fields.name("code"), fields.text("sentence", limit=MAX_SENTENCE_CHARS))


@dataclass(frozen=True, slots=True)
class Ping(Signal):
    """Ask whether the daemon lives."""

    KIND: ClassVar[str] = "ping"


@dataclass(frozen=True, slots=True)
class Pong(Signal):
    """The daemon lives."""

    KIND: ClassVar[str] = "pong"
