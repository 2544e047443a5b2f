"""Messages to frames and back."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.errors import CorruptMessage
from bridge.wire import admin, answer, fetch, ingest, observe, retention
from bridge.wire.envelope import SCHEMA_VERSION, Buffer, Envelope, seal, unseal
from bridge.wire.message import Message

MESSAGES: dict[str, type[Message]] = {
    kind.KIND: kind
    for kind in (
        ingest.Hello,
        ingest.Rows,
        ingest.RowsInShm,
        ingest.RowsHeader,
        ingest.Trajectory,
        ingest.WeightDigests,
        ingest.Dropped,
        retention.Step,
        retention.Pin,
        retention.Gc,
        retention.GcReply,
        answer.Ack,
        answer.Error,
        fetch.Fetch,
        fetch.FetchReply,
        fetch.PageRows,
        fetch.ShmPageRows,
        admin.List,
        admin.ListReply,
        admin.Digests,
        admin.DigestsReply,
        admin.Stats,
        admin.StatsReply,
        observe.Observe,
        observe.ObserveReply,
        answer.Ping,
        answer.Pong,
    )
}


def encode(message: Message, seq: int, version: int = SCHEMA_VERSION) -> list[Buffer]:
    """Return the frames of a message; large arrays are passed on without a copy."""
    return seal(message.KIND, seq, message.body(), message.frames(), version)


def decode(frames: Sequence[Buffer], version: int = SCHEMA_VERSION) -> tuple[Message, int]:
    """Return (message, seq).

    Raises:
        SchemaMismatch: the sender speaks another schema version.
        CorruptMessage: it is not a complete and unaltered message of this schema.
    """
    envelope = unseal(frames, version)
    return parsed(envelope), envelope.seq


def parsed(envelope: Envelope) -> Message:
    """Return the message of an intact envelope; raises as `decode` does."""
    kind = MESSAGES.get(envelope.kind)
    if kind is None:
        raise CorruptMessage(
            "a message of unknown type; install the same sglang-trace version on both sides"
        )
    return kind.parse(envelope)
