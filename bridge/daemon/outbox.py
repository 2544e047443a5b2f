"""Answers on their way, so that a peer that does not read them costs a bounded amount of memory."""

from __future__ import annotations

from collections import defaultdict, deque

import zmq

from bridge.wire import Message, encode

_TRACKED_BYTES = 64 << 10
# Large frames that may wait for one peer: four pages of two, and a client asks for three at a time.
_MOST_FRAMES = 8


class Outbox:
    """Sends answers through a ROUTER socket and knows how many large ones are not sent yet."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._unsent: defaultdict[bytes, deque[zmq.MessageTracker]] = defaultdict(deque)

    def send(self, peer: bytes, message: Message, seq: int) -> None:
        """Queue an answer; large frames are not copied, and their memory is free once sent."""
        frames: list[zmq.Frame | bytes | memoryview] = [peer]
        for frame in encode(message, seq):
            if memoryview(frame).nbytes < _TRACKED_BYTES:
                frames.append(frame)
            else:
                tracked = zmq.Frame(frame, track=True, copy=False)
                frames.append(tracked)
                self._unsent[peer].append(tracked.tracker)
        self._socket.send_multipart(frames, copy=False)

    def has_room(self, peer: bytes) -> bool:
        """Whether another page may be queued for the peer."""
        unsent = self._unsent[peer]
        while unsent and unsent[0].done:
            unsent.popleft()
        if not unsent:
            del self._unsent[peer]
        return len(unsent) < _MOST_FRAMES
