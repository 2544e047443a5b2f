"""Memory of clients on this machine that the daemon reads and writes.

`bridge.transport.shared_memory` says how.
"""

from __future__ import annotations

import mmap
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from bridge.errors import CorruptMessage, ShmUnreachable
from bridge.transport.shared_memory import STAMP_BYTES, opened, stamped
from bridge.wire import BufferHandle, Rows, RowsInShm

_MAX_OPEN = 64
_MAX_LENT = 1 << 30
# Of a region, what is touched is counted and looked away from in tracts of so many bytes.
_TRACT_BYTES = 1 << 20
_IDLE_S = 30.0


@dataclass(slots=True)
class _Open:
    """A client's region; None: it is out of reach, which is not tried with every question."""

    memory: memoryview | None
    key: str
    pid: int
    used_at: float
    last_seq: int = -1

    def at(self, place: BufferHandle) -> memoryview | None:
        """Return the memory of a place, its stamp first; None if it is not all there."""
        end = place.offset + STAMP_BYTES + place.nbytes
        if self.memory is None or end > len(self.memory):
            return None
        return self.memory[place.offset : end]

    def release_pages(self, tract: int) -> None:
        """Have a tract take no memory of this process: what stands there is the client's."""
        assert self.memory is not None
        assert isinstance(self.memory.obj, mmap.mmap)
        begin = tract * _TRACT_BYTES
        nbytes = min(_TRACT_BYTES, self.memory.nbytes - begin)
        self.memory.obj.madvise(mmap.MADV_DONTNEED, begin, nbytes)


class Regions:
    """Keeps the regions of clients that ask again and again, one a client.

    Of what it touches there at most ``most_bytes`` stay in this process's memory.
    """

    def __init__(self, most_bytes: int = _MAX_LENT) -> None:
        self._most_bytes = most_bytes
        self._open: dict[bytes, _Open] = {}
        # Tracts by client, which take memory here too until they are looked away from, in the order
        # of their last use.
        self._touched: OrderedDict[tuple[bytes, int], None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of clients' memory that this process maps and has touched, at most."""
        return len(self._touched) * _TRACT_BYTES

    def landing(self, peer: bytes, place: BufferHandle | None, seq: int) -> memoryview | None:
        """Return the place that a client lends for answer ``seq``, None if there is none in reach.

        A client counts its questions up. One that comes again may be answered already and its place
        lent to another answer, so nothing is written there.
        """
        if place is None:
            return None
        held = self._region(peer, place)
        memory = held.at(place)
        if memory is None or seq <= held.last_seq:
            return None
        held.last_seq = seq
        memory = memory[: max(self._most_bytes, STAMP_BYTES)]
        self._touch(peer, place.offset, len(memory))
        return memory

    def rows(self, peer: bytes, lent: RowsInShm) -> Rows:
        """Copy the rows that an engine has put into its memory.

        Raises:
            ShmUnreachable: this process cannot read that memory.
            CorruptMessage: it holds other bytes by now.
        """
        memory = self._region(peer, lent.buffer).at(lent.buffer)
        if memory is None:
            raise ShmUnreachable(
                "the bridge cannot read the engine's memory; send the rows through the socket"
            )
        self._touch(peer, lent.buffer.offset, STAMP_BYTES + lent.nbytes)
        rows_nR = np.empty((len(lent.header.rows), lent.header.row_bytes), dtype=np.uint8)
        rows_nR.reshape(-1).data[:] = memory[STAMP_BYTES : STAMP_BYTES + lent.nbytes]
        if stamped(memory) != lent.stamp:
            raise CorruptMessage("rows in shared memory have another stamp; send them again")
        return Rows(lent.header, rows_nR)

    def tick(self) -> None:
        """Let go of regions that are not used, whose clients may be gone."""
        before = time.monotonic() - _IDLE_S
        for peer in [peer for peer, held in self._open.items() if held.used_at < before]:
            self.forget(peer)

    def forget(self, peer: bytes) -> None:
        """Let go of a client's region."""
        self._open.pop(peer, None)
        for key in [key for key in self._touched if key[0] == peer]:
            del self._touched[key]

    def _touch(self, peer: bytes, offset: int, nbytes: int) -> None:
        """Count what is used next; look away from what was not used for longest."""
        tracts = range(offset // _TRACT_BYTES, (offset + nbytes - 1) // _TRACT_BYTES + 1)
        for tract in tracts:
            self._touched[peer, tract] = None
            self._touched.move_to_end((peer, tract))
        while self.nbytes > self._most_bytes and len(self._touched) > len(tracts):
            (client, tract), _ = self._touched.popitem(last=False)
            self._open[client].release_pages(tract)

    def _region(self, peer: bytes, place: BufferHandle) -> _Open:
        held = self._open.pop(peer, None)
        if held is None or held.key != place.key:
            self.forget(peer)
            held = _Open(opened(place), place.key, place.pid, 0.0)
        held.used_at = time.monotonic()
        self._open[peer] = held  # the last of them
        if len(self._open) > _MAX_OPEN:
            self.forget(next(iter(self._open)))
        return held
