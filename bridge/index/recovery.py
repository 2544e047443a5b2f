"""Build the catalog of a store by replaying its journal."""

from __future__ import annotations

import logging

from bridge.errors import TraceError
from bridge.index.catalog import Catalog, Journaled
from bridge.observe.logs import Event, event
from bridge.store.base import Store
from bridge.store.journal import unpack

log = logging.getLogger(__name__)


def recover(store: Store) -> tuple[Catalog, int]:
    """Return (catalog, number of entries that were not readable; their rows are missing)."""
    catalog = Catalog()
    damaged = 0
    for number, header in store.replay():
        try:
            told, seq = unpack(header)
            if not isinstance(told, Journaled):
                raise TraceError(f"a {told.KIND} message has no place in a journal")
            catalog.check(told)
        except TraceError as error:
            damaged += 1
            damage = event(Event.ENTRY_DAMAGED, entry=number)
            log.warning("entry %d of the store is skipped: %s", number, error, extra=damage)
            continue
        catalog.apply(told, seq, number)
    return catalog, damaged
