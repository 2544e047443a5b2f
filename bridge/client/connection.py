"""Requests to a daemon and their replies, several in flight at a time."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import zmq
from msgspec.structs import replace

from bridge.client.shm_receiver import ShmReceiver
from bridge.errors import BridgeUnreachable, CorruptMessage
from bridge.transport.loopback import is_loopback
from bridge.transport.receiving import received
from bridge.transport.sockets import Dialer, queue_for_sending
from bridge.wire import Error, Fetch, Message, PageRows, ShmPageRows, decode, encode
from bridge.wire.refusal import exception

Reply = TypeVar("Reply", bound=Message)


class Connection:
    """A socket for one thread; ``end`` is always a monotonic time in seconds."""

    def __init__(self, endpoint: str, keys: str | os.PathLike[str] | None = None) -> None:
        self._dialer = Dialer(endpoint, keys)
        self._context = zmq.Context()
        self._socket = self._dialer.dial(self._context)
        self._next_seq = 0
        self._pending: dict[int, deque[Message]] = {}
        self._shm_receiver = ShmReceiver() if is_loopback(endpoint) else None

    def send(self, request: Message) -> int:
        """Send a request; return its sequence number, which `receive` and `cancel` take."""
        seq = self._next_seq
        self._next_seq += 1
        self._pending[seq] = deque()
        if self._shm_receiver is not None and isinstance(request, Fetch):
            request = replace(request, buffer=self._shm_receiver.acquire(seq))
        queue_for_sending(self._socket, encode(request, seq))
        return seq

    def receive(self, seq: int, kind: type[Reply], end: float) -> Reply:
        """Wait for the next message of the reply to a request that is not cancelled.

        Raises:
            BridgeUnreachable: no message arrived before ``end``.
            TraceError: the error that the daemon sent, as its own class.
        """
        reply = self._next(seq, end)
        if not isinstance(reply, kind):
            raise CorruptMessage(f"the bridge answered with {reply.KIND} where {kind.KIND} is due")
        return reply

    @contextmanager
    def rows(self, seq: int, end: float) -> Iterator[PageRows]:
        """Give the next rows of the reply to a `Fetch`, to be copied within the context.

        Raises:
            BridgeUnreachable: none arrived before ``end``.
            TraceError: the error that the daemon sent, as its own class.
            CorruptMessage: the rows were overwritten while they were copied.
        """
        reply = self._next(seq, end)
        if isinstance(reply, ShmPageRows) and self._shm_receiver is not None:
            yield self._shm_receiver.rows(seq, reply)
            self._shm_receiver.check(seq, reply)
        elif isinstance(reply, PageRows):
            yield reply
        else:
            raise CorruptMessage(f"the bridge answered with {reply.KIND} where rows are due")

    def ask(self, request: Message, kind: type[Reply], end: float) -> Reply:
        """Send a request and wait for its reply of one message; raises like `receive`."""
        seq = self.send(request)
        try:
            return self.receive(seq, kind, end)
        finally:
            self.cancel([seq])

    def complete(self, seq: int) -> None:
        """End a request whose reply has arrived whole."""
        self._release(seq)
        self._pending.pop(seq, None)

    def cancel(self, seqs: Iterable[int]) -> None:
        """Cancel requests; late replies are discarded."""
        for seq in seqs:
            if self._pending.pop(seq, None) is not None and self._shm_receiver is not None:
                self._shm_receiver.abandon(seq)

    def close(self) -> None:
        """Close the socket and the shared memory."""
        if self._shm_receiver is not None:
            self._shm_receiver.close()
        self._context.destroy(linger=0)

    def _next(self, seq: int, end: float) -> Message:
        """Return the next message of a reply; raise the error that the daemon sent."""
        reply = self._take(seq, end)
        if isinstance(reply, Error):
            self._release(seq)
            raise exception(reply)
        return reply

    def _take(self, seq: int, end: float) -> Message:
        """Return the next reply to ``seq``; replies to other requests are queued."""
        queue = self._pending[seq]
        while not queue:
            self._socket.rcvtimeo = max(0, int((end - time.monotonic()) * 1000))
            try:
                frames = received(self._socket)
            except zmq.Again:
                self._reconnect()
                raise BridgeUnreachable(
                    f"no bridge answers at {self._dialer.endpoint}; {self._dialer.remedy()}"
                ) from None
            try:
                message, answered = decode([frame.buffer for frame in frames])
            except CorruptMessage:
                self._reconnect()  # the request it answers is not known
                raise
            if isinstance(message, Error) and answered < 0:
                answered = seq  # the daemon could not read the number of the request
            if answered in self._pending:
                self._pending[answered].append(message)
        return queue.popleft()

    def _release(self, seq: int) -> None:
        if self._shm_receiver is not None:
            self._shm_receiver.release(seq)

    def _reconnect(self) -> None:
        self._pending.clear()
        if self._shm_receiver is not None:
            self._shm_receiver.close()
        self._socket.close(linger=0)
        self._socket = self._dialer.dial(self._context)
