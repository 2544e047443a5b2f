"""Stands between peers and a daemon and tampers with whole ZeroMQ messages, both ways."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import zmq

Frames = list[bytes]
_IDLE_MS = 20


class Tamper(Protocol):
    """What happens to the messages of one peer in one direction; counts what it changes."""

    done: int

    def __call__(self, frames: Frames) -> list[Frames]:
        """Return what is passed on now in place of a message."""

    def rest(self) -> list[Frames]:
        """Return what was held back, when nothing comes any more."""


MakeTamper = Callable[[np.random.Generator], Tamper]


@contextmanager
def tampered(endpoint: str, make: MakeTamper, rng: np.random.Generator) -> Iterator[_Proxy]:
    """Give a proxy in front of a daemon."""
    proxy = _Proxy(endpoint, make, rng)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stop.set()
        thread.join()


class _Proxy:
    """``endpoint`` is where peers connect; each gets a connection of its own to the daemon."""

    def __init__(self, daemon: str, make: MakeTamper, rng: np.random.Generator) -> None:
        self._daemon = daemon
        self._new_tamper = lambda: make(rng)
        self.stop = threading.Event()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._front = self._socket(zmq.ROUTER)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._tampers: dict[tuple[bytes, bool], Tamper] = {}

    @property
    def done(self) -> int:
        """Messages tampered with so far."""
        return sum(tamper.done for tamper in list(self._tampers.values()))

    def run(self) -> None:
        """Pass messages on until told to stop."""
        while not self.stop.is_set():
            ready = dict(self._poller.poll(_IDLE_MS))
            if not ready:
                for (peer, to_daemon), tamper in self._tampers.items():
                    self._pass_on(peer, to_daemon, tamper.rest())
            if self._front in ready:
                peer, *frames = self._front.recv_multipart()
                self._take(peer, True, frames)
            for peer, back in list(self._backs.items()):
                if back in ready:
                    self._take(peer, False, back.recv_multipart())
        self._context.destroy(linger=0)

    def _take(self, peer: bytes, to_daemon: bool, frames: Frames) -> None:
        if peer not in self._backs:
            self._backs[peer] = self._socket(zmq.DEALER)
            self._backs[peer].connect(self._daemon)
        key = (peer, to_daemon)
        if key not in self._tampers:
            self._tampers[key] = self._new_tamper()
        self._pass_on(peer, to_daemon, self._tampers[key](frames))

    def _pass_on(self, peer: bytes, to_daemon: bool, messages: list[Frames]) -> None:
        for frames in messages:
            if to_daemon:
                self._backs[peer].send_multipart(frames)
            else:
                self._front.send_multipart([peer, *frames])

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        self._poller.register(socket, zmq.POLLIN)
        return socket
