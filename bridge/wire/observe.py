"""The question for a daemon's status document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from bridge.wire.envelope import Buffer, Envelope
from bridge.wire.message import Signal, frames_of


@dataclass(frozen=True, slots=True)
class Observe(Signal):
    """Ask for the status document."""

    KIND: ClassVar[str] = "observe"


@dataclass(frozen=True, slots=True)
class ObserveReply:
    """The status document, JSON (`bridge.observe.status`)."""

    KIND: ClassVar[str] = "observe_reply"

    document: bytes

    def body(self) -> dict[str, Any]:
        """Return no fields."""
        return {}

    def frames(self) -> list[Buffer]:
        """Return the document."""
        return [self.document]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        (document,) = frames_of(envelope, 1)
        return cls(bytes(document))
