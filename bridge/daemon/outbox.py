"""Answers on their way, so that a peer that does not read them costs a bounded amount of memory."""

from __future__ import annotations

from collections import defaultdict, deque

import zmq

from bridge.errors import TraceError
from bridge.wire import Message, encode

_TRACKED_BYTES = 64 << 10
MOST_PAGES = 4
"""Pages that wait for one peer; a client asks for fewer at a time (bridge.client)."""


class SlowReader(TraceError):
    """A client asks for pages faster than it reads them."""


class Outbox:
    """Sends answers through a ROUTER socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._unread: defaultdict[bytes, deque[zmq.MessageTracker]] = defaultdict(deque)

    def send(self, peer: bytes, message: Message, seq: int) -> None:
        """Queue an answer; large frames are not copied, and their memory is free once read."""
        frames: list[zmq.Frame | bytes | memoryview] = [peer]
        for frame in encode(message, seq):
            if memoryview(frame).nbytes < _TRACKED_BYTES:
                frames.append(frame)
            else:
                tracked = zmq.Frame(frame, track=True, copy=False)
                frames.append(tracked)
                self._unread[peer].append(tracked.tracker)
        self._socket.send_multipart(frames, copy=False)

    def check(self, peer: bytes) -> None:
        """Raise SlowReader when as many large frames wait for the peer as may."""
        unread = self._unread.get(peer)
        while unread and unread[0].done:
            unread.popleft()
        if unread is not None and not unread:
            del self._unread[peer]
        elif unread is not None and len(unread) >= 2 * MOST_PAGES:
            raise SlowReader(
                f"{len(unread)} answers wait for this client; read them before asking for more"
            )
