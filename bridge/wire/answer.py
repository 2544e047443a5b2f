"""Replies of the daemon to any peer: acknowledged, refused, alive."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from bridge.wire.envelope import MAX_SEQ
from bridge.wire.fields import MAX_LIST_ITEMS, Name
from bridge.wire.message import Message

MAX_TEXT_CHARS = 4096

_Seq = Annotated[int, Meta(ge=0, le=MAX_SEQ)]


class Ack(Message, frozen=True):
    """The store holds the peer's messages with these sequence numbers."""

    KIND: ClassVar[str] = "ack"

    seqs: Annotated[tuple[_Seq, ...], Meta(max_length=MAX_LIST_ITEMS)]


class Error(Message, frozen=True):
    """The daemon refused the message with this envelope's sequence number.

    ``code`` is the name of an error class, ``text`` its error message.
    """

    KIND: ClassVar[str] = "error"

    code: Name
    text: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


class Ping(Message, frozen=True):
    """Ask whether the daemon is alive."""

    KIND: ClassVar[str] = "ping"


class Pong(Message, frozen=True):
    """The daemon is alive."""

    KIND: ClassVar[str] = "pong"
