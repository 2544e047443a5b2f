"""Questions to a bridge and their replies, several on their way at a time."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import zmq

from bridge.client.shm_receiver import ShmReceiver
from bridge.errors import BridgeUnreachable, CorruptMessage
from bridge.transport.loopback import is_loopback
from bridge.transport.receiving import received
from bridge.transport.sockets import Dialer, queue_for_sending
from bridge.wire import Error, Fetch, Message, PageRows, ShmPageRows, decode, encode
from bridge.wire.refusal import exception

Reply = TypeVar("Reply", bound=Message)


class Connection:
    """A socket for one thread; ``end`` is always a monotonic time."""

    def __init__(self, endpoint: str, keys: str | os.PathLike[str] | None = None) -> None:
        self._dialer = Dialer(endpoint, keys)
        self._context = zmq.Context()
        self._socket = self._dialer.dial(self._context)
        self._next_seq = 0
        self._due: dict[int, deque[Message]] = {}
        self._shm_receiver = ShmReceiver() if is_loopback(endpoint) else None

    def say(self, question: Message) -> int:
        """Send a question; return the number under which its reply is asked for."""
        seq = self._next_seq
        self._next_seq += 1
        self._due[seq] = deque()
        if self._shm_receiver is not None and isinstance(question, Fetch):
            question = replace(question, buffer=self._shm_receiver.acquire(seq))
        queue_for_sending(self._socket, encode(question, seq))
        return seq

    def reply(self, seq: int, kind: type[Reply], end: float) -> Reply:
        """Wait for the next message of the reply to a question, which is due until `forget`.

        Raises:
            BridgeUnreachable: there is none at ``end``.
            TraceError: what the bridge answered, as its own class.
        """
        reply = self._told(seq, end)
        if not isinstance(reply, kind):
            raise CorruptMessage(f"the bridge answered with {reply.KIND} where {kind.KIND} is due")
        return reply

    @contextmanager
    def rows(self, seq: int, end: float) -> Iterator[PageRows]:
        """Give the next rows of the answer to a `Fetch`, to be copied within the context.

        Raises:
            BridgeUnreachable: there are none at ``end``.
            TraceError: what the bridge answered, as its own class.
            CorruptMessage: what was copied are not the rows that the bridge sent.
        """
        reply = self._told(seq, end)
        if isinstance(reply, ShmPageRows) and self._shm_receiver is not None:
            yield self._shm_receiver.rows(seq, reply)
            self._shm_receiver.check(seq, reply)
        elif isinstance(reply, PageRows):
            yield reply
        else:
            raise CorruptMessage(f"the bridge answered with {reply.KIND} where rows are due")

    def ask(self, question: Message, kind: type[Reply], end: float) -> Reply:
        """Send a question and wait for its reply of one message; raises like `reply`."""
        seq = self.say(question)
        try:
            return self.reply(seq, kind, end)
        finally:
            self.forget([seq])

    def finish(self, seq: int) -> None:
        """Be done with a question whose answer has come to its end."""
        self._whole(seq)
        self._due.pop(seq, None)

    def forget(self, seqs: Iterable[int]) -> None:
        """Be done with questions: what still comes in reply is thrown away."""
        for seq in seqs:
            if self._due.pop(seq, None) is not None and self._shm_receiver is not None:
                self._shm_receiver.abandon(seq)

    def close(self) -> None:
        """Close the socket."""
        if self._shm_receiver is not None:
            self._shm_receiver.close()
        self._context.destroy(linger=0)

    def _told(self, seq: int, end: float) -> Message:
        """Return the next message of a reply; raise what the bridge says is wrong."""
        reply = self._receive(seq, end)
        if isinstance(reply, Error):
            self._whole(seq)
            raise exception(reply)
        return reply

    def _receive(self, seq: int, end: float) -> Message:
        """Return what answers ``seq`` next, keeping what answers others and comes before it."""
        found = self._due[seq]
        while not found:
            self._socket.rcvtimeo = max(0, int((end - time.monotonic()) * 1000))
            try:
                frames = received(self._socket)
            except zmq.Again:
                self._start_anew()
                raise BridgeUnreachable(
                    f"no bridge answers at {self._dialer.endpoint}; {self._dialer.remedy()}"
                ) from None
            try:
                message, answered = decode([frame.buffer for frame in frames])
            except CorruptMessage:
                self._start_anew()  # whose reply it was is not known
                raise
            if isinstance(message, Error) and answered < 0:
                answered = seq  # the bridge could not read the number of what it refuses
            if answered in self._due:
                self._due[answered].append(message)
        return found.popleft()

    def _whole(self, seq: int) -> None:
        if self._shm_receiver is not None:
            self._shm_receiver.release(seq)

    def _start_anew(self) -> None:
        self._due.clear()
        if self._shm_receiver is not None:
            self._shm_receiver.close()
        self._socket.close(linger=0)
        self._socket = self._dialer.dial(self._context)
