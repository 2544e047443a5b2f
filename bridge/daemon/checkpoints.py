"""Writes a checkpoint of the index when idle, after many entries, and at a clean stop."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from bridge.index import Catalog
from bridge.index.checkpoint import Checkpoint
from bridge.store import Position, Store

# A start replays at most this many entries, or this fraction of all: about one second of work.
_MAX_BEHIND = 32_768
_MAX_BEHIND_PART = 32
_WORTH_IT = 1024
# A snapshot stops the daemon for a moment: at most 1/20 of its time.
_TIME_PART = 20
_COPIES = 4  # of the index must fit into memory, or the daemon takes no checkpoint


def max_behind(entries: int) -> int:
    """Return the maximum number of entries that a start replays of a journal."""
    return max(_MAX_BEHIND, entries // _MAX_BEHIND_PART)


class Checkpoints:
    """Takes snapshots of the index in the daemon's thread and writes them in another one."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[bool] | None = None
        self._written = Position(0, 0)
        self._not_before = 0.0

    def tick(self, *, quiet: bool) -> None:
        """Start to write a checkpoint if one is due; ``quiet``: no message waits for the daemon."""
        position = self._store.position()
        if position is None or not self._is_due(position, quiet) or self._is_busy():
            return
        taken = self._take(position)
        if taken is not None:
            self._writing = self._writer.submit(self._write, taken)

    def finish(self) -> None:
        """Write a last checkpoint if the newest one is not current; the daemon has stopped."""
        self.close()
        position = self._store.position()
        if position is not None and position != self._written:
            taken = self._take(position)
            if taken is not None:
                self._write(taken)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._writer.shutdown()

    def _is_due(self, position: Position, quiet: bool) -> bool:
        behind = position.next - self._written.next
        if quiet:
            return behind >= _WORTH_IT or position.deletions != self._written.deletions
        return behind >= max_behind(position.next)

    def _is_busy(self) -> bool:
        is_written = self._writing is None or self._writing.done()
        return not is_written or time.monotonic() < self._not_before

    def _take(self, position: Position) -> Checkpoint | None:
        """Return a snapshot of the index, None if memory or store have no room for it."""
        begun = time.monotonic()
        nbytes, limit = self._catalog.nbytes(), self._store.usage().memory_limit
        if limit and _COPIES * nbytes > limit:
            return None
        self._store.reserve(2 * nbytes)
        taken = Checkpoint.of(self._catalog, position)
        self._store.reserve(nbytes)
        ended = time.monotonic()
        self._not_before = ended + _TIME_PART * (ended - begun)
        self._written = position
        return taken if taken.nbytes() <= self._store.checkpoint_room() else None

    def _write(self, taken: Checkpoint) -> bool:
        return self._store.write_checkpoint(taken.chunks())
