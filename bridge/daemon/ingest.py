"""Accept messages from engines: check, store in batches, index, acknowledge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from bridge.errors import StoreFull
from bridge.index import Catalog, Told
from bridge.refusal import refusal
from bridge.store import Entry, Store
from bridge.store.journal import pack
from bridge.wire import Ack, Dropped, Hello, Message, Rows, Step, Trajectory, WeightDigests
from bridge.wire.fields import wire_bytes

Ingested = Hello | Rows | Trajectory | WeightDigests | Dropped | Step
Answer = Callable[[bytes, Message, int], None]


@dataclass(slots=True)
class Pending:
    """A checked message that waits for the store."""

    peer: bytes
    seq: int
    told: Told
    entry: Entry


class Ingest:
    """One loop turn's messages go to the store together, so they share one disk sync.

    ``answer(peer, message, seq)`` sends Ack only after the store holds the message, one for all of
    a peer's messages of the turn.
    """

    def __init__(self, store: Store, catalog: Catalog, answer: Answer) -> None:
        self._store = store
        self._catalog = catalog
        self._answer = answer
        self._pending: list[Pending] = []
        self._pending_keys: set[tuple[bytes, int]] = set()
        self._held: defaultdict[bytes, list[int]] = defaultdict(list)
        self.accepted = 0
        self.duplicates = 0
        self.refused = 0
        self.commits = 0
        self.full = False

    def take(self, peer: bytes, message: Ingested, seq: int) -> None:
        """Check a message and keep it for the next commit; raise TraceError to refuse it."""
        told: Told = message.block if isinstance(message, Rows) else message
        key = (b"" if isinstance(told, Step) else told.engine_id.encode(), seq)
        if key in self._pending_keys:
            self.commit()  # so that it is known whether the store took the first copy
        self._catalog.check(told)
        if self._catalog.seen(told, seq):
            self.duplicates += 1
            self._held[peer].append(seq)
            return
        self._pending.append(Pending(peer, seq, told, _entry(message, told, seq)))
        self._pending_keys.add(key)
        if isinstance(told, Hello):
            self.commit()  # rows behind this hello are checked against it

    def commit(self) -> None:
        """Store, index and acknowledge what is pending; refuse what the store has no room for."""
        batch, self._pending, self._pending_keys = self._pending, [], set()
        if batch:
            self.full = False
            try:
                self._hold(batch)
            except StoreFull:
                for pending in batch:
                    self._hold_or_refuse(pending)
        for peer, seqs in self._held.items():
            self._answer(peer, Ack(tuple(seqs)), seqs[0])
        self._held.clear()

    def _hold_or_refuse(self, pending: Pending) -> None:
        """A batch that does not fit may hold messages that do."""
        try:
            self._hold([pending])
        except StoreFull as error:
            self.full = True
            self.refused += 1
            self._answer(pending.peer, refusal(error), pending.seq)

    def _hold(self, batch: list[Pending]) -> None:
        numbers = self._store.append([pending.entry for pending in batch])
        for pending, number in zip(batch, numbers, strict=True):
            self._catalog.apply(pending.told, pending.seq, number)
            self._held[pending.peer].append(pending.seq)
        self._store.reserve(self._catalog.nbytes())
        self.accepted += len(batch)
        self.commits += 1


def _entry(message: Ingested, told: Told, seq: int) -> Entry:
    if isinstance(message, Rows):
        payload = wire_bytes(message.payload, "u1")
        return Entry(pack(told, seq), payload, message.block.row_bytes)
    return Entry(pack(told, seq), vital=isinstance(message, Hello | Step | Dropped))
