"""Give up records by policy: at every RL step, when asked, and what never finishes by time."""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from dataclasses import asdict, replace

from bridge.errors import StoreFull
from bridge.index import Catalog
from bridge.index.retention import garbage
from bridge.layout import Part
from bridge.observe.logs import Event, event
from bridge.store import Store
from bridge.wire import GcReply, Pin, Policy

log = logging.getLogger(__name__)

_MOST_PINS = 1 << 16
_EXPIRY_PERIOD_S = 1.0


class Retention:
    """Collects by the daemon's own policy and by those that are sent to it."""

    def __init__(self, store: Store, catalog: Catalog, policy: Policy) -> None:
        self._store = store
        self._catalog = catalog
        self._policy = policy
        self._pinned_until: dict[str, float] = {}
        self._looked_at = time.monotonic()
        self._step = catalog.step
        self._versions = 0
        self.collected = 0

    def pin(self, asked: Pin) -> None:
        """Hold trajectories for a while, or let them go; a lease outlives no reader for long."""
        if asked.lease_s and len(self._pins() | set(asked.trajectories)) > _MOST_PINS:
            raise StoreFull(
                f"{_MOST_PINS} trajectories can be pinned at a time and these would be more; "
                "unpin some, or wait for their leases to end"
            )
        now = time.monotonic()
        for name in asked.trajectories:
            if asked.lease_s:
                self._pinned_until[name] = now + asked.lease_s
            else:
                self._pinned_until.pop(name, None)

    def look(self) -> None:
        """Collect by the daemon's policy if a step, a weight version or time asks for it."""
        now = time.monotonic()
        moved = (self._catalog.step, len(self._catalog.weight_versions))
        if moved != (self._step, self._versions):
            self._step, self._versions = moved
            self.collect(self._policy)
        elif self._policy.expire_s is not None and now - self._looked_at >= _EXPIRY_PERIOD_S:
            self._looked_at = now
            self.collect(replace(self._policy, keep=None, max_version_diff=None))

    def collect(self, policy: Policy) -> GcReply:
        """Give up what the policy names, first in the store and then in the index."""
        if policy == Policy():
            return GcReply(0, 0, 0)
        catalog = self._catalog
        found = garbage(catalog, policy, self._pins(), time.monotonic())
        rows = sum(catalog.rows(part) for part in Part)
        numbers = catalog.drop(found.trajectories, found.blocks)
        numbers += catalog.digests.drop_before(found.first_step)
        try:
            self._store.drop(numbers)
        except StoreFull as error:
            log.warning(
                "collected entries stay on disk until the next restart: %s",
                error,
                extra=event(Event.DELETION_DEFERRED, entries=len(numbers)),
            )
        self._store.reserve(catalog.nbytes())
        self.collected += len(found.trajectories)
        rows -= sum(catalog.rows(part) for part in Part)
        done = GcReply(len(found.trajectories), rows, len(numbers))
        if numbers:
            log.info(
                "gave up %d trajectories and %d rows",
                done.trajectories,
                done.rows,
                extra=event(Event.RECORDS_COLLECTED, step=catalog.step, **asdict(done)),
            )
        return done

    def _pins(self) -> Set[str]:
        now = time.monotonic()
        self._pinned_until = {
            name: until for name, until in self._pinned_until.items() if until > now
        }
        return self._pinned_until.keys()
