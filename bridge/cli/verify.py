"""Check a store directory: every row, every message of its journal, and the checkpoint."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from bridge.index.checkpoint import read_checkpoint
from bridge.index.recovery import recover
from bridge.index.tables.saved import UnusableCheckpoint
from bridge.layout import Part
from bridge.store import DiskStore
from bridge.store.disk.upkeep import Progress, check_payloads
from bridge.store.pool_directory import is_pooled


@dataclass(frozen=True, slots=True)
class Verified:
    """Counts of a store's content and of its damage.

    entries, rows, nbytes   what was read: messages, record rows and their bytes
    damaged_rows            rows that fail their checksum, and ``lost_payloads`` messages without
                            their rows: they are missing for trainers
    damaged_entries         messages that are not readable, whose rows are missing too
    trajectories, indexed_rows   what the index has after it was built of the journal alone
    checkpoint              "whole", "none", or why a start would pass it over
    pooled                  the records are in a Mooncake pool, and were not read
    """

    entries: int
    rows: int
    nbytes: int
    damaged_rows: int
    lost_payloads: int
    damaged_entries: int
    trajectories: int
    indexed_rows: int
    checkpoint: str
    pooled: bool

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged; a missing checkpoint does not count."""
        return not (self.damaged_rows or self.lost_payloads or self.damaged_entries)


def verify(directory: Path, progress: Progress) -> Verified:
    """Read the whole store of a directory, also while a daemon serves it.

    Raises:
        CorruptStore, SchemaMismatch: it is not a store that can be read.
    """
    with closing(DiskStore(directory, 0, readonly=True)) as store:
        payloads = check_payloads(store, progress)
        catalog, damaged = recover(store, from_checkpoint=False)
        return Verified(
            **asdict(payloads),
            damaged_entries=damaged,
            trajectories=len(catalog.trajectories),
            indexed_rows=sum(catalog.rows(part) for part in Part),
            checkpoint=_checkpoint(store),
            pooled=is_pooled(directory),
        )


def _checkpoint(store: DiskStore) -> str:
    content = store.read_checkpoint()
    if content is None:
        return "none"
    try:
        read_checkpoint(content)
    except UnusableCheckpoint as error:
        return str(error)
    return "whole"
