"""Answers on their way, so that peers that do not read them cost a bounded amount of memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import zmq

from bridge.daemon.memory.budget import MAX_PAGE_BYTES, Budget
from bridge.wire import Message, encode
from bridge.wire.envelope import Buffer

_TRACKED_BYTES = 64 << 10
# Small frames are not worth a tracker each: one of them stands for those before it.
_LOOSE_BYTES = 8 << 10
_FRAME_BYTES = 128
# Beyond its share a peer is told that much: acknowledgements and refusals.
_SMALL_BYTES = 32 << 10
_MAX_BYTES = 2 * MAX_PAGE_BYTES
_MAX_PEERS = 4096


@dataclass(slots=True)
class _Unsent:
    """What a peer has not taken yet, oldest first; ``loose`` bytes are not among them."""

    queue: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    nbytes: int = 0
    loose: int = 0


class Outbox:
    """Sends answers through a ROUTER socket and knows how much of them is not sent yet.

    ``lost`` counts what peers were not told because they have not read what they were told before.
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
        """Queue an answer for which there is `room`; return False if the peer is gone.

        Large frames are not copied, and their memory is free once they are sent.
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
        """Queue a small answer that needs no room, unless the peer has not read many of them."""
        unsent = self._unsent(peer)
        if unsent.nbytes > _SMALL_BYTES:
            self.tick()
            most = min(self._budget.share(len(self._behind)), _MAX_BYTES)
            if unsent.nbytes > most + _SMALL_BYTES:
                self.lost += 1
                return
        self.send(peer, message, seq)

    def room(self, peer: bytes, waiting: int = 0) -> int:
        """Return how many bytes may be queued for a peer now; 0: it has to read first.

        ``waiting`` is how many peers wait for theirs.
        """
        self.tick()
        queued = self._unsent(peer).nbytes
        share = min(self._budget.share(len(self._behind) + waiting), _MAX_BYTES)
        room = min(share - queued, self._budget.answers - self.nbytes)
        least = self._budget.least_share
        if room >= least:
            return room
        # No more than ZeroMQ takes for the connection: nobody waits for those that do not read.
        return 0 if queued else least

    def tick(self) -> None:
        """Find out what has been sent."""
        for peer, unsent in list(self._behind.items()):
            while unsent.queue and unsent.queue[0][0].done:
                nbytes = unsent.queue.popleft()[1]
                unsent.nbytes -= nbytes
                self.nbytes -= nbytes
            if not unsent.queue:
                del self._behind[peer]

    def forget(self, peer: bytes) -> None:
        """Let go of a peer that is gone."""
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
        """Return a frame to be sent, one that tells when it is if it is large or due to tell."""
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
