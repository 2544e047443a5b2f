"""Questions to a bridge and their replies, several on their way at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TypeVar

import zmq

from bridge.dialer import Dialer
from bridge.errors import BridgeUnreachable, CorruptMessage
from bridge.refusal import exception
from bridge.wire import Error, Message, decode, encode

Reply = TypeVar("Reply", bound=Message)


class Connection:
    """A socket for one thread; ``end`` is always a monotonic time."""

    def __init__(self, endpoint: str, keys: str | os.PathLike[str] | None = None) -> None:
        self._dialer = Dialer(endpoint, keys)
        self._context = zmq.Context()
        self._socket = self._dialer.dial(self._context)
        self._next_seq = 0
        self._due: dict[int, Message | None] = {}

    def say(self, question: Message) -> int:
        """Send a question; return the number under which its reply is asked for."""
        seq = self._next_seq
        self._next_seq += 1
        self._due[seq] = None
        self._socket.send_multipart(encode(question, seq), copy=False)
        return seq

    def reply(self, seq: int, kind: type[Reply], end: float) -> Reply:
        """Wait for the reply to a question.

        Raises:
            BridgeUnreachable: there is none at ``end``.
            TraceError: what the bridge answered, as its own class.
        """
        reply = self._receive(seq, end)
        if isinstance(reply, Error):
            raise exception(reply)
        if not isinstance(reply, kind):
            raise CorruptMessage(f"the bridge answered with {reply.KIND} where {kind.KIND} is due")
        return reply

    def ask(self, question: Message, kind: type[Reply], end: float) -> Reply:
        """Send a question and wait for its reply; raises like `reply`."""
        return self.reply(self.say(question), kind, end)

    def forget(self, seqs: Iterable[int]) -> None:
        """Give up questions: their replies are thrown away when they come."""
        for seq in seqs:
            self._due.pop(seq, None)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)

    def _receive(self, seq: int, end: float) -> Message:
        """Return the reply to ``seq``, keeping those to other questions that come before it."""
        while (found := self._due[seq]) is None:
            if not self._socket.poll(max(0, int((end - time.monotonic()) * 1000))):
                self._start_anew()
                raise BridgeUnreachable(
                    f"no bridge answers at {self._dialer.endpoint}; {self._dialer.remedy()}"
                )
            frames = self._socket.recv_multipart(copy=False)
            try:
                message, answered = decode([frame.buffer for frame in frames])
            except CorruptMessage:
                self._start_anew()  # whose reply it was is not known
                raise
            if isinstance(message, Error) and answered < 0:
                answered = seq  # the bridge could not read the number of what it refuses
            if answered in self._due:
                self._due[answered] = message
        del self._due[seq]
        return found

    def _start_anew(self) -> None:
        self._due.clear()
        self._socket.close(linger=0)
        self._socket = self._dialer.dial(self._context)
