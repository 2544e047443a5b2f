"""Shared-memory segments of clients on this machine, which the daemon reads and writes.

`bridge.transport.shared_memory` describes the protocol.
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
_MAX_SHM = 1 << 30
# The daemon counts and releases touched memory of a segment in spans of this size.
_SPAN_BYTES = 1 << 20
_IDLE_S = 30.0


@dataclass(slots=True)
class _Open:
    """A client's segment; memory None: it is unreachable, and the daemon does not retry."""

    memory: memoryview | None
    key: str
    pid: int
    used_at: float
    last_seq: int = -1

    def at(self, buffer: BufferHandle) -> memoryview | None:
        """Return the memory of a buffer, stamp first; None if the segment is shorter."""
        end = buffer.offset + STAMP_BYTES + buffer.nbytes
        if self.memory is None or end > len(self.memory):
            return None
        return self.memory[buffer.offset : end]

    def release_pages(self, span: int) -> None:
        """Release the pages of a span in this process; the client keeps the content."""
        assert self.memory is not None
        assert isinstance(self.memory.obj, mmap.mmap)
        begin = span * _SPAN_BYTES
        nbytes = min(_SPAN_BYTES, self.memory.nbytes - begin)
        self.memory.obj.madvise(mmap.MADV_DONTNEED, begin, nbytes)


class ShmSegments:
    """Keeps one open segment per client.

    At most ``max_bytes`` of touched pages stay in this process's memory.
    """

    def __init__(self, max_bytes: int = _MAX_SHM) -> None:
        self._max_bytes = max_bytes
        self._open: dict[bytes, _Open] = {}
        # Touched spans by client, in the order of their last use; they take memory of this process
        # until they are released.
        self._touched: OrderedDict[tuple[bytes, int], None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Maximum bytes of clients' memory that this process has touched."""
        return len(self._touched) * _SPAN_BYTES

    def target(self, peer: bytes, buffer: BufferHandle | None, seq: int) -> memoryview | None:
        """Return the buffer of a client for answer ``seq``, None if it is unreachable.

        A client numbers its requests upwards. The daemon may have answered a repeated request
        already, and the client may use its buffer for another answer, so the daemon does not write.
        """
        if buffer is None:
            return None
        held = self._segment(peer, buffer)
        memory = held.at(buffer)
        if memory is None or seq <= held.last_seq:
            return None
        held.last_seq = seq
        memory = memory[: max(self._max_bytes, STAMP_BYTES)]
        self._touch(peer, buffer.offset, len(memory))
        return memory

    def rows(self, peer: bytes, rows: RowsInShm) -> Rows:
        """Copy the rows that an engine has written to shared memory.

        Raises:
            ShmUnreachable: this process cannot read the segment.
            CorruptMessage: the engine has reused the buffer.
        """
        memory = self._segment(peer, rows.buffer).at(rows.buffer)
        if memory is None:
            raise ShmUnreachable(
                "the bridge cannot read the engine's memory; send the rows through the socket"
            )
        self._touch(peer, rows.buffer.offset, STAMP_BYTES + rows.nbytes)
        rows_nR = np.empty((len(rows.header.rows), rows.header.row_bytes), dtype=np.uint8)
        rows_nR.reshape(-1).data[:] = memory[STAMP_BYTES : STAMP_BYTES + rows.nbytes]
        if stamped(memory) != rows.stamp:
            raise CorruptMessage("rows in shared memory have another stamp; send them again")
        return Rows(rows.header, rows_nR)

    def tick(self) -> None:
        """Close segments that have not been used for `_IDLE_S`."""
        before = time.monotonic() - _IDLE_S
        for peer in [peer for peer, held in self._open.items() if held.used_at < before]:
            self.forget(peer)

    def forget(self, peer: bytes) -> None:
        """Close a client's segment."""
        self._open.pop(peer, None)
        for key in [key for key in self._touched if key[0] == peer]:
            del self._touched[key]

    def _touch(self, peer: bytes, offset: int, nbytes: int) -> None:
        """Count the spans that are used next; release the least recently used ones."""
        spans = range(offset // _SPAN_BYTES, (offset + nbytes - 1) // _SPAN_BYTES + 1)
        for span in spans:
            self._touched[peer, span] = None
            self._touched.move_to_end((peer, span))
        while self.nbytes > self._max_bytes and len(self._touched) > len(spans):
            (client, span), _ = self._touched.popitem(last=False)
            self._open[client].release_pages(span)

    def _segment(self, peer: bytes, buffer: BufferHandle) -> _Open:
        held = self._open.pop(peer, None)
        if held is None or held.key != buffer.key:
            self.forget(peer)
            held = _Open(opened(buffer), buffer.key, buffer.pid, 0.0)
        held.used_at = time.monotonic()
        self._open[peer] = held  # now the most recently used one
        if len(self._open) > _MAX_OPEN:
            self.forget(next(iter(self._open)))
        return held
