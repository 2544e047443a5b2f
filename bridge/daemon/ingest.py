"""Accept messages from engines: check, store in batches, index, acknowledge."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from bridge.daemon.counters import Counters
from bridge.daemon.fetch.gather import Gather
from bridge.daemon.health import StoreHealth, StoreState
from bridge.daemon.held_rows import Arriving, HeldRows, require_distinct
from bridge.errors import StoreFailing, StoreFull
from bridge.index import Catalog, IngestedRecord
from bridge.observe.logs import Event, event
from bridge.observe.status import Waiting
from bridge.store import Entry, Store
from bridge.store.journal import pack
from bridge.wire import (
    Ack,
    Dropped,
    Hello,
    Message,
    Rows,
    RowsHeader,
    Step,
    Trajectory,
    WeightDigests,
)
from bridge.wire.fields import wire_bytes
from bridge.wire.refusal import refusal

log = logging.getLogger(__name__)

Ingested = Hello | Rows | Trajectory | WeightDigests | Dropped | Step
# Growth of the index in bytes up to which a message needs no check of the memory limit.
_MUCH_INDEX = 512 << 10
_STEPS_REMEMBERED = 1024
_REFUSALS = {StoreFull: Event.STORE_FULL, StoreFailing: Event.STORE_FAILING}
Answer = Callable[[bytes, Message, int], None]


@dataclass(slots=True)
class Pending:
    """A checked message that the store does not have yet."""

    peer: bytes
    seq: int
    record: IngestedRecord
    entry: Entry
    received_at: float


class Ingest:
    """Stores the messages of one loop iteration together, so they share one disk sync.

    It sends an Ack with ``answer(peer, message, seq)`` only after the store has the messages, one
    Ack per peer and loop iteration.
    """

    def __init__(
        self, store: Store, catalog: Catalog, counters: Counters, gather: Gather, answer: Answer
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._counters = counters
        self._answer = answer
        self._held_rows = HeldRows(catalog, gather)
        self._arriving = Arriving()
        self._pending: list[Pending] = []
        self._storing: list[Pending] = []
        self._pending_keys: set[tuple[str, int, int]] = set()
        self._held: defaultdict[bytes, list[int]] = defaultdict(list)
        self._steps_reported: OrderedDict[tuple[bytes, int, int], None] = OrderedDict()
        self.accepted = 0
        self.duplicates = 0
        self.commits = 0
        self.health = StoreHealth()
        self._announced_full = False

    def take(self, peer: bytes, message: Ingested, seq: int) -> None:
        """Check a message and keep it for the next commit; raise TraceError to refuse it."""
        record: IngestedRecord = message.header if isinstance(message, Rows) else message
        engine_id, shard = ("", 0) if isinstance(record, Step) else (record.engine_id, record.shard)
        key = (engine_id, shard, seq)
        if key in self._pending_keys:
            self.commit()  # to know whether the store took the first copy
        self._catalog.check(record)
        are_held = isinstance(message, Rows) and self._are_held(message)
        now = time.monotonic()
        if engine_id in self._catalog.engines:
            self._counters.last_seen[engine_id] = now
        if are_held or self._catalog.seen(record, seq) or self._came_before(peer, record, seq):
            self.duplicates += 1
            self._held[peer].append(seq)
            return
        growth = self._catalog.growth(record)
        alone = isinstance(record, Hello) or growth > _MUCH_INDEX
        if alone:
            self.commit()
            self._require_room(growth)
        self._pending.append(Pending(peer, seq, record, _entry(message, record, seq), now))
        self._pending_keys.add(key)
        if isinstance(record, RowsHeader):
            self._arriving.add(record)
        if alone:
            self.commit()  # the checks of the next messages need it

    def _are_held(self, message: Rows) -> bool:
        """Whether the store has all rows; raise RowTaken if it has one with other bytes."""
        require_distinct(message.header)
        if self._arriving.overlaps(message.header):
            self.commit()  # to compare them
        return self._held_rows.hold(message)

    def _came_before(self, peer: bytes, record: IngestedRecord, seq: int) -> bool:
        """Whether a Step is a copy of an older message; if not, the trainer goes back to it."""
        return isinstance(record, Step) and (peer, seq, record.step) in self._steps_reported

    def _remember(self, peer: bytes, record: Step, seq: int) -> None:
        self._steps_reported[(peer, seq, record.step)] = None
        if len(self._steps_reported) > _STEPS_REMEMBERED:
            self._steps_reported.popitem(last=False)

    def waiting(self, now: float) -> Waiting:
        """Return the unacknowledged rows at monotonic time ``now``; any thread may call it."""
        waiting = self._pending or self._storing
        blocks = [pending.record for pending in waiting if isinstance(pending.record, RowsHeader)]
        return Waiting(
            rows=sum(len(block.rows) for block in blocks),
            nbytes=sum(len(block.rows) * block.row_bytes for block in blocks),
            oldest_s=now - waiting[0].received_at if waiting else 0.0,
        )

    def commit(self) -> None:
        """Store, index and acknowledge pending messages; refuse those that do not fit."""
        batch = self._storing = self._pending
        self._pending, self._pending_keys = [], set()
        self._arriving.clear()
        if batch:
            before, self.health = self.health, StoreHealth()
            try:
                self._hold(batch)
            except StoreFull:
                for pending in batch:
                    self._hold_or_refuse(pending)
            self.health = self.health.lasting(before)
            self._announce_room(batch)
        for peer, seqs in self._held.items():
            self._answer(peer, Ack(tuple(seqs)), seqs[0])
        self._held.clear()
        self._storing = []

    def _require_room(self, growth: int) -> None:
        """Reserve memory for the index; raise StoreFull if it would grow beyond the limit."""
        limit, held = self._store.usage().memory_limit, self._catalog.nbytes()
        if limit and held + growth > limit:
            error = StoreFull(
                f"the index of the bridge's records takes {held} bytes and this message would add "
                f"{growth}, more than the memory limit of {limit}; number rows and positions "
                "without large gaps, collect old steps (python -m bridge gc) or raise "
                "--memory-limit"
            )
            self.health = StoreHealth.of(error).lasting(self.health)
            raise error
        self._store.reserve(held + growth)

    def _hold_or_refuse(self, pending: Pending) -> None:
        """Store one message of a batch that did not fit, or refuse it."""
        try:
            self._hold([pending])
        except StoreFull as error:
            if not self._announced_full:
                log.warning("%s", error, extra=event(_REFUSALS[type(error)]))
            self._announced_full = True
            self.health = StoreHealth.of(error)
            self._counters.refuse(error)
            self._store.reserve(self._catalog.nbytes())
            self._answer(pending.peer, refusal(error), pending.seq)

    def _announce_room(self, batch: list[Pending]) -> None:
        """Log that a full store has space again; a batch of reserved entries does not prove it."""
        is_well = self.health.state is StoreState.OK
        if self._announced_full and is_well and not all(item.entry.reserved for item in batch):
            log.info("the store takes records again", extra=event(Event.STORE_HAS_ROOM))
            self._announced_full = False

    def _hold(self, batch: list[Pending]) -> None:
        numbers = self._store.append([pending.entry for pending in batch])
        now = time.monotonic()
        for pending, number in zip(batch, numbers, strict=True):
            self._catalog.apply(pending.record, pending.seq, number)
            self._held[pending.peer].append(pending.seq)
            self._counters.store(pending.record, now - pending.received_at)
            if isinstance(pending.record, Step):
                self._remember(pending.peer, pending.record, pending.seq)
            else:
                self._counters.last_seen[pending.record.engine_id] = now
            if isinstance(pending.record, Hello | Dropped):
                _log(pending.record)
        self._store.reserve(self._catalog.nbytes())
        self.accepted += len(batch)
        self.commits += 1


def _log(record: Hello | Dropped) -> None:
    if isinstance(record, Hello):
        log.info(
            "engine %s joins",
            record.engine_id,
            extra=event(Event.ENGINE_JOINED, engine=record.engine_id),
        )
        return
    log.warning(
        "engine %s has dropped %d forward and %d K/V rows so far",
        record.engine_id,
        record.forward_rows,
        record.kv_rows,
        extra=event(
            Event.ROWS_DROPPED,
            engine=record.engine_id,
            forward_rows=record.forward_rows,
            kv_rows=record.kv_rows,
        ),
    )


def _entry(message: Ingested, record: IngestedRecord, seq: int) -> Entry:
    if isinstance(message, Rows):
        payload = wire_bytes(message.payload, "u1")
        return Entry(pack(record, seq), payload, message.header.row_bytes)
    reserved, frees_space = isinstance(message, Hello | Step | Dropped), isinstance(message, Step)
    return Entry(pack(record, seq), reserved=reserved, frees_space=frees_space)
