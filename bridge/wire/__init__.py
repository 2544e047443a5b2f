"""The ZeroMQ messages of the bridge: Structs, their frames, a parser that bounds all sizes."""

from bridge.wire.admin import (
    Digests,
    DigestsReply,
    List,
    ListReply,
    Stats,
    StatsReply,
    TrajectorySummary,
)
from bridge.wire.answer import Ack, Error, Ping, Pong
from bridge.wire.buffer import BufferHandle
from bridge.wire.codec import MESSAGES, decode, encode
from bridge.wire.envelope import MAX_FRAME_BYTES, SCHEMA_VERSION
from bridge.wire.fetch import Fetch, FetchReply, PageRows, ShmPageRows
from bridge.wire.ingest import (
    Dropped,
    Hello,
    Rows,
    RowsHeader,
    RowsInShm,
    Trajectory,
    TrajectoryState,
    WeightDigests,
)
from bridge.wire.message import Message
from bridge.wire.observe import Observe, ObserveReply
from bridge.wire.retention import Gc, GcReply, Pin, Policy, Step

__all__ = [
    "MAX_FRAME_BYTES",
    "MESSAGES",
    "SCHEMA_VERSION",
    "Ack",
    "BufferHandle",
    "Digests",
    "DigestsReply",
    "Dropped",
    "Error",
    "Fetch",
    "FetchReply",
    "Gc",
    "GcReply",
    "Hello",
    "List",
    "ListReply",
    "Message",
    "Observe",
    "ObserveReply",
    "PageRows",
    "Pin",
    "Ping",
    "Policy",
    "Pong",
    "Rows",
    "RowsHeader",
    "RowsInShm",
    "ShmPageRows",
    "Stats",
    "StatsReply",
    "Step",
    "Trajectory",
    "TrajectoryState",
    "TrajectorySummary",
    "WeightDigests",
    "decode",
    "encode",
]
