"""When the index is written to its checkpoint: in quiet, after many entries, and at the end."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from bridge.index import Catalog
from bridge.index.checkpoint import Checkpoint
from bridge.store import Position, Store

# A start replays so many entries at most, or this part of those held, about a second's work.
_MAX_BEHIND = 32_768
_MAX_BEHIND_PART = 32
_WORTH_IT = 1024
# A checkpoint stops the daemon for a moment: at most this part of its time.
_TIME_PART = 20
_COPIES = 4  # of the index there is room for in memory, or no checkpoint is taken


def most_behind(entries: int) -> int:
    """Return how many entries a start replays at most, of a journal that had so many."""
    return max(_MAX_BEHIND, entries // _MAX_BEHIND_PART)


class Checkpoints:
    """Takes the index in the daemon's thread and writes it in another one."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[bool] | None = None
        self._written = Position(0, 0)
        self._not_before = 0.0

    def tick(self, *, quiet: bool) -> None:
        """Begin to write a checkpoint if one is due; ``quiet``: nobody waits for the daemon."""
        position = self._store.position()
        if position is None or not self._is_due(position, quiet) or self._is_busy():
            return
        taken = self._take(position)
        if taken is not None:
            self._writing = self._writer.submit(self._write, taken)

    def finish(self) -> None:
        """Write what the last checkpoint has not; the daemon has stopped between two messages."""
        self.close()
        position = self._store.position()
        if position is not None and position != self._written:
            taken = self._take(position)
            if taken is not None:
                self._write(taken)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()

    def _is_due(self, position: Position, quiet: bool) -> bool:
        behind = position.next - self._written.next
        if quiet:
            return behind >= _WORTH_IT or position.deletions != self._written.deletions
        return behind >= most_behind(position.next)

    def _is_busy(self) -> bool:
        is_written = self._writing is None or self._writing.done()
        return not is_written or time.monotonic() < self._not_before

    def _take(self, position: Position) -> Checkpoint | None:
        """Copy the index, None if memory or the store has no room for the copy."""
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
