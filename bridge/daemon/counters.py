"""Counters of received and sent rows since the daemon started."""

from __future__ import annotations

from collections import Counter

from bridge.errors import TraceError
from bridge.index import IngestedRecord
from bridge.layout import Part
from bridge.observe.histogram import Durations
from bridge.wire import PageRows, RowsHeader, ShmPageRows


class Counters:
    """Plain counters; only the daemon's thread may use them."""

    def __init__(self) -> None:
        self.rows_received: Counter[Part] = Counter()
        self.bytes_received: Counter[Part] = Counter()
        self.rows_sent: Counter[Part] = Counter()
        self.bytes_sent: Counter[Part] = Counter()
        self.refused: Counter[str] = Counter()
        self.last_seen: dict[str, float] = {}
        self.ack_latency = Durations()

    def store(self, record: IngestedRecord, waited_s: float) -> None:
        """Count a message that the store has taken; the daemon acknowledges it next."""
        self.ack_latency.add(waited_s)
        if isinstance(record, RowsHeader):
            self.rows_received[record.part] += len(record.rows)
            self.bytes_received[record.part] += len(record.rows) * record.row_bytes

    def send(self, chunk: PageRows | ShmPageRows) -> None:
        """Count the rows and record bytes of a chunk; missing rows do not count."""
        self.rows_sent[chunk.part] += chunk.count
        self.bytes_sent[chunk.part] += chunk.nbytes

    def refuse(self, error: TraceError) -> None:
        """Count a message that the daemon answers with an error."""
        self.refused[type(error).__name__] += 1
