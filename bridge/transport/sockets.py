"""Client sockets, and the reason why a daemon rejects a connection."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from bridge.transport.curve_keys import ClientKeys
from bridge.transport.endpoints import dialled_endpoint, unknown_host
from bridge.transport.loopback import bound_buffers
from bridge.wire import MAX_FRAME_BYTES
from bridge.wire.envelope import Buffer

# Which of these a side sees when only the other one has keys depends on who hangs up first.
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
_NOT_CONNECTED = zmq.EVENT_CLOSED
_TRY_MS = 1000
_EVENT = struct.Struct("=Hi")


def queue_for_sending(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Queue a message on a dialled socket, whose queue is unbounded, without ever waiting.

    ZeroMQ closes a connection for good when the peer rejects its handshake. A send would then block
    forever, so the message is dropped instead. The caller that waits for the reply reconnects, or
    reports the cause at its deadline.
    """
    with suppress(zmq.Again):
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


class Dialer:
    """Connects to one endpoint, with a client's key file or without.

    Raises:
        InvalidEndpoint: it is not an address to connect to.
        InvalidKeys: the file is not a client's key file, or other users can read it.
    """

    def __init__(self, endpoint: str, keys: str | os.PathLike[str] | None) -> None:
        self.endpoint = dialled_endpoint(endpoint)
        self._file = None if keys is None else Path(keys)
        self._keys = None if self._file is None else ClientKeys.load(self._file)

    def dial(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """Return a new DEALER that connects."""
        socket = self._dealer(context)
        socket.connect(self.endpoint)
        return socket

    def remedy(self) -> str:
        """Connect once more for at most a second; return the fix, for the end of an error."""
        outcome = self._try()
        if outcome == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"it does not know the key in {self._file}: name the client in its key file with "
                "`python -m bridge keys DIR CLIENT`, start it again, and use DIR/CLIENT.keys"
            )
        if outcome in _FAILURES and self._keys is None:
            return (
                "it asks for a key: pass the key file that `python -m bridge keys DIR CLIENT` made "
                "for this client"
            )
        if outcome in _FAILURES:
            return (
                f"it has another key than {self._file} says, or none: use the file that "
                "`python -m bridge keys DIR CLIENT` made beside its bridge.keys, and serve with "
                "--keys DIR/bridge.keys"
            )
        if outcome == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "it takes connections, so it is busy: raise the timeout, or see its log"
        if (host := unknown_host(self.endpoint)) is not None:
            return f"no address is known for {host}: correct the name"
        keys = "" if self._keys is None else " --keys DIR/bridge.keys"
        return f"start it: python -m bridge serve --endpoint {self.endpoint}{keys}"

    def _dealer(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)  # the sender bounds the bytes in flight
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if "[" in self.endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        bound_buffers(socket, self.endpoint)
        if self._keys is not None:
            self._keys.secure(socket)
        return socket

    def _try(self) -> int:
        """Connect once more and return the ZeroMQ event of the outcome, 0 after a timeout."""
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | _NOT_CONNECTED
        for failure in _FAILURES:
            events |= failure
        with (
            zmq.Context() as context,
            self._dealer(context) as socket,
            socket.get_monitor_socket(events) as monitor,
        ):
            socket.connect(self.endpoint)
            if not monitor.poll(_TRY_MS):
                return 0
            event, _ = monitor.recv_multipart()
            outcome: int = _EVENT.unpack(event)[0]
            return outcome
