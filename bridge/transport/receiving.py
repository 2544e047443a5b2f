"""Take one message off a socket without a copy, however many frames a stranger gave it."""

from __future__ import annotations

import zmq

from bridge.wire.envelope import MAX_FRAMES

_MOST_FRAMES = MAX_FRAMES + 2  # a peer's name, and one frame more than a message may have


def received(socket: zmq.Socket[bytes], flags: int = 0) -> list[zmq.Frame]:
    """Return the frames of the next message, of which no more are kept than tell that it is bad.

    Raises:
        zmq.Again: there is none, or none in time.
    """
    frames = [socket.recv(flags, copy=False)]
    more = frames[0].more
    while more:  # all frames of a message arrive at once
        frame = socket.recv(flags, copy=False)
        more = frame.more
        if len(frames) < _MOST_FRAMES:
            frames.append(frame)
    return frames
