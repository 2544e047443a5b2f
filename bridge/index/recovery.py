"""Build the catalog of a store from its checkpoint and the newer part of the journal."""

from __future__ import annotations

import logging

import numpy as np

from bridge.errors import TraceError
from bridge.index.catalog import Catalog, JournalRecord
from bridge.index.checkpoint import read_checkpoint
from bridge.index.tables.saved import UnusableCheckpoint
from bridge.observe.logs import Event, event
from bridge.store.base import Store
from bridge.store.journal import unpack

log = logging.getLogger(__name__)


def recover(store: Store, *, from_checkpoint: bool = True) -> tuple[Catalog, int]:
    """Return (catalog, number of unreadable entries); rows of unreadable entries are missing."""
    catalog, first = _checkpoint(store) if from_checkpoint else (Catalog(), 0)
    damaged = 0
    for number, header in store.replay(first):
        try:
            record, seq = unpack(header)
            if not isinstance(record, JournalRecord):
                raise TraceError(f"a {record.KIND} message does not belong in a journal")
            catalog.check(record)
        except TraceError as error:
            damaged += 1
            damage = event(Event.ENTRY_DAMAGED, entry=number)
            log.warning("entry %d of the store is skipped: %s", number, error, extra=damage)
            continue
        catalog.apply(record, seq, number)
    return catalog, damaged


def _checkpoint(store: Store) -> tuple[Catalog, int]:
    """Return (catalog, first entry to replay); an empty catalog and 0 without a checkpoint."""
    content, now = store.read_checkpoint(), store.position()
    if content is None or now is None:
        return Catalog(), 0
    try:
        catalog, then = read_checkpoint(content)
        if then.next > now.next or then.deletions > now.deletions:
            raise UnusableCheckpoint("it is newer than the journal")
        if then.deletions != now.deletions:
            deleted = np.setdiff1d(catalog.entries(), store.numbers())
            if not catalog.forget(deleted):
                raise UnusableCheckpoint("only some entries of a trajectory or digest were deleted")
    except UnusableCheckpoint as error:
        log.info("the daemon ignores the checkpoint and reads the whole journal: %s", error)
        return Catalog(), 0
    catalog.begin_anew()
    return catalog, then.next
