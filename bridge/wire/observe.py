"""The request for a daemon's status document."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from bridge.wire.envelope import Buffer, Envelope
from bridge.wire.message import Message, frames_of


class Observe(Message, frozen=True):
    """Request the status document."""

    KIND: ClassVar[str] = "observe"


class ObserveReply(Message, frozen=True):
    """The status document, JSON (`bridge.observe.status`)."""

    KIND: ClassVar[str] = "observe_reply"

    document: bytes

    def body(self) -> dict[str, Any]:
        """Return no fields: the document is a frame."""
        return {}

    def frames(self) -> list[Buffer]:
        """Return the document."""
        return [self.document]

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        (document,) = frames_of(envelope, 1)
        return cls(bytes(document))
