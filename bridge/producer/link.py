"""An engine's connection to one bridge: messages are kept until the bridge acknowledges them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

import zmq

from bridge.errors import (
    BridgeUnreachable,
    CorruptMessage,
    EngineIdTaken,
    ShmUnreachable,
    StoreFull,
    TraceError,
    UnknownEngine,
)
from bridge.layout import Part
from bridge.producer.shm_sender import ShmSender
from bridge.transport.loopback import is_loopback
from bridge.transport.sockets import Dialer, queue_for_sending
from bridge.wire import Ack, Dropped, Error, Hello, Message, Rows, RowsInShm, decode, encode
from bridge.wire.envelope import NO_SEQ, Buffer
from bridge.wire.fields import MAX_INCARNATION
from bridge.wire.refusal import exception

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20
_HEADER_BYTES = 256  # about
# A daemon that refuses the registration refuses all that follows: do not send the window at once.
_REGISTER_PAUSE_S = 0.2


class Overflow(StrEnum):
    """What an engine does with records that the bridge does not accept in time."""

    BLOCK = "block"
    """Wait: nothing is lost, and the engine is as slow as the bridge."""
    DROP = "drop"
    """Drop rows and count them; the trainer finds them missing."""


@dataclass(frozen=True, slots=True)
class _Unacknowledged:
    """``in_shm`` is the handle of rows that were put into shared memory."""

    frames: list[Buffer]
    nbytes: int
    part: Part | None
    rows: int
    in_shm: RowsInShm | None = None


_NOTHING = _Unacknowledged([], 0, None, 0)


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Limits of a link; `bridge.producer.producer.RecordProducer` describes them."""

    window_bytes: int
    resend_after_s: float
    deadline_s: float
    overflow: Overflow
    full_deadline_s: float


class BridgeLink:
    """Sends messages to one bridge in order; raises as `RecordProducer` says.

    ``incarnation`` is the number of this process at this bridge, for all of its messages.
    """

    def __init__(
        self, endpoint: str, keys: str | os.PathLike[str] | None, options: LinkOptions
    ) -> None:
        self.endpoint = endpoint
        self.incarnation = 1 + secrets.randbelow(MAX_INCARNATION - 1)
        self.acknowledged_rows = 0
        self.dropped_rows: Counter[Part] = Counter()
        self._options = options
        self._hello: Hello | None = None
        self._registration: list[Buffer] = []
        self._next_seq = 0
        self._kept: dict[int, _Unacknowledged] = {}
        self._kept_bytes = 0
        self._answered = False
        self._failures: list[TraceError] = []
        self._fenced: EngineIdTaken | None = None
        self._full: StoreFull | None = None
        self._refused: set[int] = set()
        self._refused_at = 0.0
        self._reported_dropped = 0
        self._dropped_seq: int | None = None
        self._progress_at = self._heard_at = self._resent_at = time.monotonic()
        self._dialer = Dialer(endpoint, keys)
        self._shm_sender: ShmSender | None = None
        if is_loopback(endpoint):
            self._shm_sender = ShmSender(options.window_bytes, MESSAGE_BYTES)
        self._context = zmq.Context()
        self._socket = self._dialer.dial(self._context)

    def register(self, message: Hello) -> None:
        """Register the engine, before all other messages; returns when the bridge has answered."""
        self._hello = message
        self._registration = encode(message, self._next_seq)
        self.send(message)
        self.flush()

    def send(self, message: Message, part: Part | None = None, rows: int = 0) -> None:
        """Send a message, or drop it with its ``rows`` of ``part`` if it exceeds the window."""
        if self._hello is None:
            raise TraceError("the bridge does not know this engine yet; call register() first")
        if self._fenced is not None:
            raise self._fenced
        nbytes = _HEADER_BYTES + sum(memoryview(frame).nbytes for frame in message.frames())
        if self._reserve(nbytes, part):
            in_shm = self._into_shm(message)
            frames = encode(in_shm or message, self._next_seq)
            self._keep_and_send(_Unacknowledged(frames, nbytes, part, rows, in_shm))
        elif part is not None:
            self.dropped_rows[part] += rows
        self._report_dropped()
        self._pump(0.0)
        self._raise_failure()

    def count_dropped(self, part: Part, rows: int) -> None:
        """Count rows that the engine dropped before it sent them; the bridge gets the count."""
        self.dropped_rows[part] += rows

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return self._kept_bytes

    def poll(self, *, may_drop: bool = True) -> None:
        """Process the replies that have arrived and resend what is due, without waiting.

        Without ``may_drop`` it raises at the deadline even if rows may be dropped.
        """
        self._report_dropped()
        self._pump(0.0, may_drop=may_drop)
        self._raise_failure()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is acknowledged, whether rows may be dropped or not.

        Raises:
            StoreFull: it is not after ``timeout_s``, or nothing was acknowledged for the deadline,
                because the bridge's store is full.
            BridgeUnreachable: likewise, for another reason.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._raise_failure()
        self._report_dropped()
        while self._kept:
            if end is not None and time.monotonic() >= end:
                raise self._not_acknowledged(timeout_s or 0.0)
            self._pump(0.05, may_drop=False)
            self._raise_failure()
            self._report_dropped()

    def close(self) -> None:
        """Close the connection at once; call flush() first to be sure of the last records."""
        self._context.destroy(linger=0)
        if self._shm_sender is not None:
            self._shm_sender.close()

    # --- the window

    def _into_shm(self, message: Message) -> RowsInShm | None:
        """Put rows into shared memory; None if they go through the socket."""
        if self._shm_sender is None or not isinstance(message, Rows):
            return None
        return self._shm_sender.put(message)

    def _keep_and_send(self, message: _Unacknowledged) -> None:
        if not self._kept:
            self._progress_at = self._heard_at = time.monotonic()
        self._kept[self._next_seq] = message
        self._kept_bytes += message.nbytes
        self._next_seq += 1
        queue_for_sending(self._socket, message.frames)

    def _reserve(self, nbytes: int, part: Part | None) -> bool:
        """Wait until the message fits the window; return False if it is to be dropped instead."""
        window = self._options.window_bytes
        if self._options.overflow is Overflow.DROP:
            self._pump(0.0)
            window += window // 4 if part is None else 0
            return not self._kept or self._kept_bytes + nbytes <= window
        while self._kept and self._kept_bytes + nbytes > window:
            self._pump(0.05)
            self._raise_failure()
        return True

    def _report_dropped(self) -> None:
        """Report the count of dropped rows, unless that is reported or in flight."""
        total = self.dropped_rows.total()
        if (
            self._hello is None
            or total == self._reported_dropped
            or self._dropped_seq in self._kept
        ):
            return
        counts = self.dropped_rows
        message = Dropped(
            self._hello.engine_id,
            counts[Part.FORWARD],
            counts[Part.KV],
            self._hello.shard,
            self.incarnation,
        )
        self._dropped_seq, self._reported_dropped = self._next_seq, total
        frames = encode(message, self._next_seq)
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
        self._keep_and_send(_Unacknowledged(frames, nbytes, None, 0))

    def _pump(self, wait_s: float, *, may_drop: bool = True) -> None:
        """Handle all replies that arrived, waiting for the first; then resend, drop or raise.

        Raises:
            StoreFull, BridgeUnreachable: after the deadline, unless messages may be dropped.
        """
        wait_ms = int(wait_s * 1000)
        while self._kept and self._socket.poll(wait_ms):
            self._handle(self._socket.recv_multipart())
            wait_ms = 0
        now = time.monotonic()
        if self._refused and now - self._refused_at > self._options.resend_after_s:
            self._send_refused()
        if self._kept and now - max(self._heard_at, self._resent_at) > self._options.resend_after_s:
            self._resend()
        deadline_s = (
            self._options.full_deadline_s if self._is_full(now) else self._options.deadline_s
        )
        if self._kept and now - self._progress_at > deadline_s:
            error = self._not_acknowledged(now - self._progress_at)
            if self._options.overflow is Overflow.BLOCK or not (self._answered and may_drop):
                raise error
            log.warning("records are dropped: %s", error)
            self._progress_at = now

    def _handle(self, frames: list[bytes]) -> None:
        try:
            message, seq = decode(frames)
        except CorruptMessage as damage:
            log.warning("a damaged answer of the bridge counts as none: %s", damage)
            return
        self._heard_at = time.monotonic()
        if isinstance(message, Ack):
            self._answered = True
            rows = sum(self._remove(acknowledged).rows for acknowledged in message.seqs)
            self.acknowledged_rows += rows
            self._full = None if rows else self._full
        elif isinstance(message, Error):
            error = exception(message)
            if isinstance(error, ShmUnreachable | CorruptMessage) and seq != NO_SEQ:
                self._send_through_socket(seq, error)
            elif isinstance(error, UnknownEngine):
                self._reregister()  # the daemon was restarted without our history
            elif isinstance(error, CorruptMessage) and seq == NO_SEQ:
                log.warning("a message was damaged in transit and is resent: %s", error)
                self._reregister()
            elif isinstance(error, EngineIdTaken):
                self._fenced = error
                for kept in list(self._kept):
                    self._remove(kept)  # the bridge will never take it
            elif isinstance(error, StoreFull):
                self._refuse(seq, error)
            else:
                self._remove(seq)
                self._failures.append(error)

    def _send_through_socket(self, seq: int, error: TraceError) -> None:
        """Send rows through the socket that the bridge could not read in shared memory."""
        kept = self._kept.get(seq)
        if kept is None:
            return  # a copy of a message that was answered before
        if kept.in_shm is None or self._shm_sender is None:
            self._remove(seq)
            self._failures.append(error)
            return
        if isinstance(error, ShmUnreachable):
            self._shm_sender.stop()
        frames = encode(self._shm_sender.reclaim(kept.in_shm), seq)
        self._kept[seq] = replace(kept, frames=frames, in_shm=None)
        queue_for_sending(self._socket, frames)

    def _refuse(self, seq: int, error: StoreFull) -> None:
        """Drop a message that the full store refused, or keep it for a later try."""
        if self._full is None:
            log.warning("the engine %ss records: %s", self._options.overflow.value, error)
        self._full = error
        self._refused_at = time.monotonic()
        kept = self._kept.get(seq)
        if self._options.overflow is Overflow.DROP and kept is not None and kept.part is not None:
            self.dropped_rows[kept.part] += self._remove(seq).rows
        else:
            self._refused.add(seq)

    def _send_refused(self) -> None:
        """Resend what the full store refused; the rest is in flight."""
        for seq in sorted(self._refused & self._kept.keys()):
            queue_for_sending(self._socket, self._kept[seq].frames)
        self._refused.clear()
        self._resent_at = time.monotonic()

    def _reregister(self) -> None:
        """Resend from the registration on, unless that was done a moment ago."""
        if time.monotonic() - self._resent_at > _REGISTER_PAUSE_S:
            self._resend()

    def _remove(self, seq: int) -> _Unacknowledged:
        """Remove an answered message and return it; an empty one if it was removed before."""
        kept = self._kept.pop(seq, _NOTHING)
        self._kept_bytes -= kept.nbytes
        if kept.in_shm is not None and self._shm_sender is not None:
            self._shm_sender.release(kept.in_shm)
        self._progress_at = time.monotonic()
        return kept

    def _raise_failure(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._failures:
            first, self._failures = self._failures[0], []
            raise first

    # --- the socket

    def _resend(self) -> None:
        """Send the registration and all unacknowledged messages over a new connection.

        The queue of the old connection may hold copies of the same messages.
        """
        self._socket.close(linger=0)
        self._socket = self._dialer.dial(self._context)
        for frames in (self._registration, *(kept.frames for kept in self._kept.values())):
            queue_for_sending(self._socket, frames)
        self._refused.clear()
        self._resent_at = time.monotonic()

    def _is_full(self, now: float) -> bool:
        """Whether the bridge answers and its store is full."""
        return self._full is not None and now - self._heard_at <= 2 * self._options.resend_after_s

    def _not_acknowledged(self, waited_s: float) -> StoreFull | BridgeUnreachable:
        """Return the error for a deadline without acknowledgement: full store or no answer."""
        if self._is_full(time.monotonic()):
            return StoreFull(
                f"the bridge at {self.endpoint} took nothing for {waited_s:.3g} s because it is "
                f"full ({len(self._kept)} messages wait): {self._full}"
            )
        return BridgeUnreachable(
            f"no bridge acknowledged anything at {self.endpoint} for {waited_s:.3g} s "
            f"({len(self._kept)} messages wait); {self._dialer.remedy()}"
        )
