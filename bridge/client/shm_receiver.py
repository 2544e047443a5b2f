"""The client's end of the shared-memory transport (`bridge.transport.shared_memory`)."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from bridge.errors import CorruptMessage
from bridge.transport.shared_memory import STAMP_BYTES, ShmSegment, stamped
from bridge.wire import BufferHandle, PageRows, ShmPageRows

_NO_BUFFER = "rows arrived in shared memory that was not offered for them; fetch again"


class ShmReceiver:
    """The buffers of one connection; a new connection has a new receiver.

    The daemon may still write to the buffer of a cancelled request, so such a buffer is abandoned.
    Once no other buffer is in use, the receiver replaces the whole segment.
    """

    def __init__(self) -> None:
        self._segment: ShmSegment | None = None
        self._in_use: dict[int, BufferHandle] = {}
        self._is_abandoned = False
        self._is_unavailable = False

    def acquire(self, seq: int) -> BufferHandle | None:
        """Return a buffer for the reply ``seq``, None if it has to come through the socket."""
        if self._is_unavailable:
            return None
        if self._is_abandoned and not self._in_use:
            self.close()
        if self._segment is None:
            self._segment = self._new_segment()
        buffer = None if self._segment is None else self._segment.acquire()
        if buffer is not None:
            self._in_use[seq] = buffer
        return buffer

    def rows(self, seq: int, page: ShmPageRows) -> PageRows:
        """Return a view of the rows in the buffer of reply ``seq``; copy them, then `check`.

        Raises:
            CorruptMessage: they do not fit the buffer.
        """
        view = self._view(seq, page)
        rows_VW = np.frombuffer(view, dtype=np.uint8).reshape(-1, page.row_bytes)
        return PageRows(page.part, page.begin, page.valid, rows_VW)

    def check(self, seq: int, page: ShmPageRows) -> None:
        """Raise CorruptMessage if the rows of `rows` have been overwritten since."""
        if stamped(self._memory(seq)) != page.stamp:
            raise CorruptMessage(
                "rows in shared memory have another stamp: the bridge wrote there again, as if it "
                "had been asked twice; fetch again"
            )

    def release(self, seq: int) -> None:
        """Release the buffer of a reply that is complete."""
        buffer = self._in_use.pop(seq, None)
        if buffer is not None and self._segment is not None:
            self._segment.release(buffer)

    def abandon(self, seq: int) -> None:
        """Abandon the buffer of a cancelled request."""
        if self._in_use.pop(seq, None) is not None:
            self._is_abandoned = True

    def close(self) -> None:
        """Close the segment."""
        self._in_use.clear()
        self._is_abandoned = False
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _new_segment(self) -> ShmSegment | None:
        with suppress(OSError, AttributeError):  # no memfd_create
            return ShmSegment()
        self._is_unavailable = True
        return None

    def _view(self, seq: int, page: ShmPageRows) -> memoryview:
        rows = self._memory(seq)[STAMP_BYTES:]
        if page.at + page.nbytes > len(rows):
            raise CorruptMessage(_NO_BUFFER)
        return rows[page.at : page.at + page.nbytes]

    def _memory(self, seq: int) -> memoryview:
        buffer = self._in_use.get(seq)
        if buffer is None or self._segment is None:
            raise CorruptMessage(_NO_BUFFER)
        return self._segment.memory(buffer)
