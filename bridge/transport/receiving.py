"""Receive one message without a copy, and bound how many frames of it are kept."""

from __future__ import annotations

import zmq

from bridge.wire.envelope import MAX_FRAMES

_MAX_FRAMES = MAX_FRAMES + 2  # the peer's identity, and one frame more than allowed


def received(socket: zmq.Socket[bytes], flags: int = 0) -> list[zmq.Frame]:
    """Receive one message; drain all frames, keep at most enough to reject it as too long.

    Raises:
        zmq.Again: there is no message, or none within the socket's timeout.
    """
    frames = [socket.recv(flags, copy=False)]
    more = frames[0].more
    while more:  # all frames of a message arrive at once
        frame = socket.recv(flags, copy=False)
        more = frame.more
        if len(frames) < _MAX_FRAMES:
            frames.append(frame)
    return frames
