"""Answers in flight: peers that do not read cost a limited amount of memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import zmq

from bridge.daemon.memory.budget import MAX_PAGE_BYTES, Budget
from bridge.wire import Message, encode
from bridge.wire.envelope import Buffer

_TRACKED_BYTES = 64 << 10
# Small frames get no tracker of their own; one tracker counts for the frames before it.
_LOOSE_BYTES = 8 << 10
_FRAME_BYTES = 128
# Bytes of acknowledgements and errors that a peer gets beyond its share.
_SMALL_BYTES = 32 << 10
_MAX_BYTES = 2 * MAX_PAGE_BYTES
_MAX_PEERS = 4096


@dataclass(slots=True)
class _Unsent:
    """Unsent frames of a peer, oldest first; ``loose`` bytes have no tracker yet."""

    queue: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    nbytes: int = 0
    loose: int = 0


class Outbox:
    """Sends answers through a ROUTER socket and counts the unsent bytes.

    ``lost`` counts small answers that were discarded because the peer does not read.
    """

    def __init__(self, socket: zmq.Socket[bytes], budget: Budget) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = socket
        self._budget = budget
        self._peers: dict[bytes, _Unsent] = {}
        self._behind: dict[bytes, _Unsent] = {}
        self.nbytes = 0
        self.lost = 0

    def send(self, peer: bytes, message: Message, seq: int) -> bool:
        """Queue an answer that fits into `room`; return False if the peer has disconnected.

        ZeroMQ does not copy large frames; their memory is free after sending.
        """
        part: Buffer | zmq.Frame = peer
        unsent = self._unsent(peer)
        try:
            for frame in encode(message, seq):
                self._socket.send(part, zmq.SNDMORE, copy=False)
                part = self._counted(unsent, frame)
            self._socket.send(part, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.forget(peer)
            return False
        if unsent.queue:
            self._behind[peer] = unsent
        return True

    def reply(self, peer: bytes, message: Message, seq: int) -> None:
        """Queue a small answer without `room`; discard it if the peer has not read many."""
        unsent = self._unsent(peer)
        if unsent.nbytes > _SMALL_BYTES:
            self.tick()
            limit = min(self._budget.share(len(self._behind)), _MAX_BYTES)
            if unsent.nbytes > limit + _SMALL_BYTES:
                self.lost += 1
                return
        self.send(peer, message, seq)

    def room(self, peer: bytes, waiting: int = 0) -> int:
        """Return the bytes that may be queued for a peer now; 0: the peer has to read first.

        ``waiting`` is the number of waiting peers.
        """
        self.tick()
        queued = self._unsent(peer).nbytes
        share = min(self._budget.share(len(self._behind) + waiting), _MAX_BYTES)
        room = min(share - queued, self._budget.answers - self.nbytes)
        minimum = self._budget.min_share
        if room >= minimum:
            return room
        # At most what ZeroMQ buffers per connection: no client waits for peers that do not read.
        return 0 if queued else minimum

    def tick(self) -> None:
        """Update the counts of unsent bytes."""
        for peer, unsent in list(self._behind.items()):
            while unsent.queue and unsent.queue[0][0].done:
                nbytes = unsent.queue.popleft()[1]
                unsent.nbytes -= nbytes
                self.nbytes -= nbytes
            if not unsent.queue:
                del self._behind[peer]

    def forget(self, peer: bytes) -> None:
        """Forget a disconnected peer."""
        self._behind.pop(peer, None)
        unsent = self._peers.pop(peer, None)
        if unsent is not None:
            self.nbytes -= unsent.nbytes

    def _unsent(self, peer: bytes) -> _Unsent:
        unsent = self._peers.get(peer)
        if unsent is None:
            if len(self._peers) >= _MAX_PEERS:
                self.forget(next((one for one in self._peers if one not in self._behind), peer))
            unsent = self._peers[peer] = _Unsent()
        return unsent

    def _counted(self, unsent: _Unsent, frame: Buffer) -> Buffer | zmq.Frame:
        """Return the frame for ZeroMQ, with a tracker if it or the loose bytes are large."""
        nbytes = memoryview(frame).nbytes
        unsent.loose += nbytes + _FRAME_BYTES
        if nbytes < _TRACKED_BYTES and unsent.loose < _LOOSE_BYTES:
            return frame
        tracked = zmq.Frame(frame, track=True, copy=False)
        unsent.queue.append((tracked.tracker, unsent.loose))
        unsent.nbytes += unsent.loose
        self.nbytes += unsent.loose
        unsent.loose = 0
        return tracked
