"""The engine's end of the shared-memory transport (`bridge.transport.shared_memory`).

A message keeps its buffer until it is acknowledged, so it can be resent, alone or with others.
Messages differ in size, so several share a slab, one behind the other. A slab is reused once all
of its messages are acknowledged.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from bridge.transport.shared_memory import STAMP_BYTES, ShmSegment, stamp
from bridge.wire import BufferHandle, Rows, RowsInShm
from bridge.wire.buffer import MAX_SEGMENT_BYTES
from bridge.wire.fields import wire_bytes

# Smaller messages cost their handling, not their bytes.
_MIN_BYTES = 256 << 10
_SLAB_MESSAGES = 4  # of the largest size; more messages per slab waste less at its end
_SPARE_SLABS = 2  # a slab waits for its last message, the window does not


@dataclass(slots=True)
class _Slab:
    """Room for messages one behind the other; ``buffers`` are those since it was last empty."""

    room: BufferHandle
    used: int = 0
    waiting: int = 0
    buffers: list[BufferHandle] = field(default_factory=list)

    def allocate(self, nbytes: int) -> BufferHandle | None:
        """Return the next buffer of ``nbytes``, None if the slab has not that much left."""
        if self.used + STAMP_BYTES + nbytes > STAMP_BYTES + self.room.nbytes:
            return None
        buffer = replace(self.room, offset=self.room.offset + self.used, nbytes=nbytes)
        self.used += -(-(STAMP_BYTES + nbytes) // STAMP_BYTES) * STAMP_BYTES
        self.waiting += 1
        self.buffers.append(buffer)
        return buffer


class ShmSender:
    """Buffers for messages of at most ``message_bytes``, about ``window_bytes`` in total."""

    def __init__(self, window_bytes: int, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._slab_bytes = _SLAB_MESSAGES * (message_bytes + STAMP_BYTES) - STAMP_BYTES
        # The segment's key has a page of its own.
        max_slabs = (MAX_SEGMENT_BYTES - self._slab_bytes) // (self._slab_bytes + STAMP_BYTES)
        self._slabs = min(window_bytes // self._slab_bytes + _SPARE_SLABS, max_slabs)
        self._segment: ShmSegment | None = None
        self._open: _Slab | None = None
        self._free: list[_Slab] = []
        self._slab_of: dict[int, _Slab] = {}

    def put(self, rows: Rows) -> RowsInShm | None:
        """Copy the payload of a large message to a buffer; None: send it through the socket."""
        payload = wire_bytes(rows.payload, np.uint8)
        if not self._slabs or not _MIN_BYTES <= payload.nbytes <= self._message_bytes:
            return None
        if self._segment is None:
            self._segment = self._new_segment()
        buffer = None if self._segment is None else self._next_buffer(payload.nbytes)
        if buffer is None or self._segment is None:
            return None
        memory = self._segment.memory(buffer)
        stamped = stamp(memory)
        memory[STAMP_BYTES : STAMP_BYTES + payload.nbytes] = payload
        return RowsInShm(rows.header, buffer, stamped)

    def reclaim(self, in_shm: RowsInShm) -> Rows:
        """Return the message with its payload, and release its buffer."""
        assert self._segment is not None
        rows = self._segment.memory(in_shm.buffer)[STAMP_BYTES:]
        payload = np.frombuffer(bytes(rows[: in_shm.nbytes]), np.uint8).reshape(
            -1, in_shm.header.row_bytes
        )
        self.release(in_shm)
        return Rows(in_shm.header, payload)

    def release(self, in_shm: RowsInShm) -> None:
        """Release the buffer of an acknowledged message; its slab is reused with its last one."""
        slab = self._slab_of.pop(in_shm.buffer.offset)
        slab.waiting -= 1
        if not slab.waiting:
            self._empty(slab)
            if slab is not self._open:
                self._free.append(slab)

    def stop(self) -> None:
        """Use shared memory for no further message."""
        self._slabs = 0

    def close(self) -> None:
        """Close the segment."""
        if self._segment is not None:
            self._segment.close()

    def _next_buffer(self, nbytes: int) -> BufferHandle | None:
        """Return an unused buffer, None if there is none."""
        buffer = None if self._open is None else self._open.allocate(nbytes)
        if buffer is None and self._free:
            # The slab that was freed last is most likely to be in the CPU caches.
            self._open = self._free.pop()
            buffer = self._open.allocate(nbytes)
        if buffer is not None and self._open is not None:
            self._slab_of[buffer.offset] = self._open
        return buffer

    def _empty(self, slab: _Slab) -> None:
        """Reset a slab.

        A late reader of an old buffer must not find its stamp there, wherever the next messages
        begin. So every old buffer gets a new stamp before anything else is written.
        """
        assert self._segment is not None
        for buffer in slab.buffers:
            stamp(self._segment.memory(buffer))
        slab.buffers.clear()
        slab.used = 0

    def _new_segment(self) -> ShmSegment | None:
        with suppress(OSError):
            segment = ShmSegment(self._slabs, self._slab_bytes)
            while (room := segment.acquire()) is not None:
                self._free.append(_Slab(room))
            return segment
        self.stop()
        return None
