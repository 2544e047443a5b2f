"""Answers on their way, so that a peer that does not read them costs a bounded amount of memory."""

from __future__ import annotations

from collections import defaultdict, deque

import zmq

from bridge.daemon.fetching import MAX_PAGE_BYTES
from bridge.wire import Message, encode
from bridge.wire.envelope import Buffer

_TRACKED_BYTES = 64 << 10
# What may wait for one peer when another page is read for it.
_MOST_BYTES = 2 * MAX_PAGE_BYTES


_Unsent = tuple[zmq.MessageTracker, int]


class Outbox:
    """Sends answers through a ROUTER socket and knows how many large ones are not sent yet."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._unsent: defaultdict[bytes, deque[_Unsent]] = defaultdict(deque)

    def send(self, peer: bytes, message: Message, seq: int) -> None:
        """Queue an answer; large frames are not copied, and their memory is free once sent."""
        part: Buffer | zmq.Frame = peer
        for frame in encode(message, seq):
            self._socket.send(part, zmq.SNDMORE, copy=False)
            part = frame
            nbytes = memoryview(frame).nbytes
            if nbytes >= _TRACKED_BYTES:
                part = zmq.Frame(frame, track=True, copy=False)
                self._unsent[peer].append((part.tracker, nbytes))
        self._socket.send(part, copy=False)

    def has_room(self, peer: bytes) -> bool:
        """Whether another page may be queued for the peer."""
        unsent = self._unsent[peer]
        while unsent and unsent[0][0].done:
            unsent.popleft()
        if not unsent:
            del self._unsent[peer]
        return sum(nbytes for _, nbytes in unsent) < _MOST_BYTES
