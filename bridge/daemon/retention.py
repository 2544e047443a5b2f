"""Evict records by policy: at every RL step and on request; expire unfinished trajectories."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from msgspec.structs import asdict

from bridge.errors import StoreFull
from bridge.index import Catalog
from bridge.index.pins import cost
from bridge.index.retention import garbage
from bridge.layout import Part
from bridge.observe.logs import Event, event
from bridge.store import Entry, Store
from bridge.store.journal import pack
from bridge.wire import GcReply, Pin, Policy

log = logging.getLogger(__name__)

_MAX_PINS = 1 << 16
_MIN_PIN_BYTES = 64 << 10
# The daemon deletes superseded entries together, because a deletion costs two disk syncs.
_SUPERSEDED = 64
_EXPIRY_PERIOD_S = 1.0


class Retention:
    """Evicts by the daemon's own policy and by the policies of Gc messages."""

    def __init__(self, store: Store, catalog: Catalog, policy: Policy) -> None:
        self._store = store
        self._catalog = catalog
        self._policy = policy
        self._ticked_at = time.monotonic()
        self._step = catalog.step
        self._versions = 0
        self._max_steps = _SUPERSEDED
        self.collected = 0
        self._delete(self._take_superseded())

    def pin(self, asked: Pin) -> None:
        """Pin trajectories for the time of a lease, or unpin them if the lease is 0.

        Raises:
            StoreFull: the store has no space for more pins.
        """
        pins, now = self._catalog.pins, time.monotonic()
        expired = pins.expire(now)
        if not asked.lease_s:
            self._delete([*expired, *pins.remove(asked.trajectories)])
            return
        self._delete(expired)
        self._require_room_for_pins(asked.trajectories)
        names = [
            name
            for name in dict.fromkeys(asked.trajectories)
            if not pins.renew(name, asked.lease_s, now)
        ]
        each = [Pin((name,), asked.lease_s) for name in names]
        numbers = self._store.append([Entry(pack(pin, 0), reserved=True) for pin in each])
        for pin, number in zip(each, numbers, strict=True):
            self._catalog.apply(pin, 0, number)

    def tick(self) -> None:
        """Evict by the daemon's policy after a new step, a new weight version or some time."""
        now = time.monotonic()
        if len(self._catalog.steps) > self._max_steps:
            self._catalog.supersede_steps()
            self._max_steps = max(_SUPERSEDED, 2 * len(self._catalog.steps))
        if len(self._catalog.superseded) >= _SUPERSEDED:
            self._delete(self._take_superseded())
        moved = (self._catalog.step, len(self._catalog.weight_versions))
        if moved != (self._step, self._versions):
            self._step, self._versions = moved
            self.collect(self._policy)
        elif self._policy.expire_s is not None and now - self._ticked_at >= _EXPIRY_PERIOD_S:
            self._ticked_at = now
            self.collect(replace(self._policy, keep=None, max_version_diff=None))

    def collect(self, policy: Policy) -> GcReply:
        """Evict what the policy names, first from the index and then from the store."""
        if policy == Policy():
            return GcReply(0, 0, 0)
        catalog = self._catalog
        now = time.monotonic()
        expired = catalog.pins.expire(now)
        found = garbage(catalog, policy, catalog.pins.names, now)
        rows = sum(catalog.rows(part) for part in Part)
        numbers = catalog.delete(found.trajectories, found.blocks)
        numbers += catalog.digests.delete(found.steps)
        self._delete([*numbers, *expired, *self._take_superseded()])
        self.collected += len(found.trajectories)
        rows -= sum(catalog.rows(part) for part in Part)
        done = GcReply(len(found.trajectories), rows, len(numbers))
        if numbers:
            log.info(
                "evicted %d trajectories and %d rows",
                done.trajectories,
                done.rows,
                extra=event(Event.RECORDS_COLLECTED, step=catalog.step, **asdict(done)),
            )
        return done

    def _require_room_for_pins(self, names: Iterable[str]) -> None:
        """Raise StoreFull if there are too many pins, because they use reserved space."""
        pins, usage = self._catalog.pins, self._store.usage()
        new = [name for name in set(names) if name not in pins]
        limit = min(limit for limit in (usage.memory_limit, usage.disk_limit, 1 << 40) if limit)
        max_bytes = max(limit // 64, _MIN_PIN_BYTES)
        if len(pins) + len(new) > _MAX_PINS:
            raise StoreFull(
                f"{_MAX_PINS} trajectories can be pinned at a time, and these would be more; "
                "unpin some, or wait for their leases to end"
            )
        if pins.nbytes + sum(map(cost, new)) > max_bytes:
            raise StoreFull(
                f"the names of pinned trajectories may take {max_bytes} bytes and these would take "
                "more; unpin some, wait for leases to end, or raise --memory-limit"
            )

    def _take_superseded(self) -> list[int]:
        superseded, self._catalog.superseded = self._catalog.superseded, []
        return superseded

    def _delete(self, numbers: list[int]) -> None:
        """Delete store entries that the index no longer has."""
        if not numbers:
            return
        try:
            self._store.delete(numbers)
        except StoreFull as error:
            log.warning(
                "evicted entries stay on disk until the next deletion: %s",
                error,
                extra=event(Event.DELETION_DEFERRED, entries=len(numbers)),
            )
        self._store.reserve(self._catalog.nbytes())
