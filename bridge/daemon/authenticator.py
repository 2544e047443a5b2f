"""Reject untrusted peers: CURVE on the daemon's socket, and a ZAP handler for ZeroMQ.

The daemon receives nothing from an untrusted peer: ZeroMQ closes a connection without a handshake.
ZAP is RFC 27 of ZeroMQ.
"""

from __future__ import annotations

import logging
import struct
import time

import zmq
from zmq.utils import z85

from bridge.transport.curve_keys import BridgeKeys

log = logging.getLogger(__name__)

_WARNING_PERIOD_S = 1.0
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"bridge"
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_WHY = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is none of the clients' in the key file",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has another bridge's key or does not speak CURVE",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it has no key or went away",
}
_EVENT = struct.Struct("=Hi")


class Authenticator:
    """Accept the clients of a key file at a socket that is not bound yet; count the others.

    The daemon's loop polls ``sockets`` too and calls ``run_once``. ZeroMQ accepts no client before
    the authenticator has answered its ZAP request.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        keys: BridgeKeys,
    ) -> None:
        self.refused = 0
        self._warned_at = 0.0
        self._names = {z85.decode(public): name for name, public in keys.clients.items()}
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        socket.curve_server = True
        socket.curve_secretkey = keys.own.secret.encode()
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = socket.get_monitor_socket(_FAILURES)
        self.sockets = (self._zap, self._monitor)

    def run_once(self) -> None:
        """Answer ZAP requests and count failed handshakes."""
        while self._zap.poll(0):
            version, request, _, address, _, mechanism, *credentials = self._zap.recv_multipart()
            name = self._names.get(credentials[0]) if mechanism == b"CURVE" else None
            if name is None:
                log.info("the key of %s is not known", address.decode("ascii", "replace"))
            status = b"400" if name is None else b"200"
            self._zap.send_multipart([version, request, status, b"", (name or "").encode(), b""])
        while self._monitor.poll(0):
            event, _ = self._monitor.recv_multipart()
            self.refused += 1
            self._warn(_WHY[_EVENT.unpack(event)[0]])

    def _warn(self, why: str) -> None:
        """Log a refused connection, at most once per `_WARNING_PERIOD_S`."""
        now = time.monotonic()
        if now - self._warned_at >= _WARNING_PERIOD_S:
            self._warned_at = now
            log.warning("a connection is refused (%d so far): %s", self.refused, why)
