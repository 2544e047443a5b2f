"""The engine's side: send records, keep them until the bridge holds them.

Shapes: n = rows of one call, R = bytes of a row, T = tokens.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import TracebackType
from typing import Self

import numpy as np
import zmq
from numpy.typing import ArrayLike

from bridge.errors import (
    BridgeUnreachable,
    CorruptMessage,
    EngineIdTaken,
    ShmUnreachable,
    StoreFull,
    TraceError,
    UnknownEngine,
)
from bridge.layout import Part, RecordLayout, Shard
from bridge.producer.shm_sender import ShmSender
from bridge.transport.loopback import is_loopback
from bridge.transport.sockets import Dialer, queue_for_sending
from bridge.wire import (
    Ack,
    Dropped,
    Error,
    Hello,
    Message,
    Rows,
    RowsInShm,
    Trajectory,
    TrajectoryState,
    WeightDigests,
    decode,
    encode,
)
from bridge.wire.envelope import NO_SEQ, Buffer
from bridge.wire.fields import MAX_INCARNATION
from bridge.wire.refusal import exception

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 4 << 20
_HEADER_BYTES = 256  # about
# A daemon that refuses the hello refuses all that follows: do not send the window at line rate.
_HELLO_PAUSE_S = 0.2


class Overflow(StrEnum):
    """What an engine does with records that the bridge does not take in time."""

    BLOCK = "block"
    """Wait: nothing is lost, and the engine is as slow as the bridge."""
    DROP = "drop"
    """Go on: rows are given up and counted, and the trainer finds them missing."""


@dataclass(frozen=True, slots=True)
class _Unacknowledged:
    """``in_shm`` is the handle of rows that were put into shared memory."""

    frames: list[Buffer]
    nbytes: int
    part: Part | None
    rows: int
    in_shm: RowsInShm | None = None


_NOTHING = _Unacknowledged([], 0, None, 0)


class RecordProducer:
    """One engine's connection to a bridge; use it from one thread.

    ``keys`` is this client's key file (`bridge.keys`), for a bridge that serves with keys.

    Every message is kept until it is acknowledged and sent again after ``resend_after_s`` without
    progress, also to a daemon that was restarted at the same endpoint, while its store is full, and
    after damage on the way. For a bridge on loopback the rows of large messages are put into memory
    that it reads (`bridge.producer.shm_sender`), as long as there is room.
    At most ``window_bytes`` are kept (or one message, if larger). A call that would exceed them
    waits, or with ``Overflow.DROP`` gives up its rows, counts them in ``dropped_rows`` and tells
    the bridge how many there were; other messages, which are small, may exceed the window by a
    quarter before they are given up too.

    A wait ends ``deadline_s`` after the bridge's last acknowledgement: that the store is full is an
    answer, but the bridge holds nothing by it. ``full_deadline_s`` is another time for that case,
    for an engine whose trainer makes room only now and then. With ``Overflow.DROP`` only `flush`
    and `hello` wait.

    Every call may raise, for itself or for an earlier message:
        StoreFull: the bridge acknowledged nothing for the deadline because its store is full.
        BridgeUnreachable: it acknowledged nothing for ``deadline_s`` for another reason.
            After either, what is kept is tried again by the next call, which raises again unless
            something is acknowledged. Whether the call's own message is kept is open: repeat it, a
            row or trajectory that arrives twice is harmless.
        SchemaMismatch: the bridge runs another version, or rows do not fit the hello.
        EngineIdTaken: another process said hello with the engine id before; every later call raises
            it too, because the bridge takes nothing of this process.
        RowTaken: a row was sent before with other bytes or as computed with other weights.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        keys: str | os.PathLike[str] | None = None,
        window_bytes: int = 64 << 20,
        resend_after_s: float = 2.0,
        deadline_s: float = 30.0,
        overflow: Overflow = Overflow.BLOCK,
        full_deadline_s: float | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.acknowledged_rows = 0
        self.dropped_rows: Counter[Part] = Counter()
        self._overflow = overflow
        self._window_bytes = window_bytes
        self._resend_after_s = resend_after_s
        self._deadline_s = deadline_s
        self._full_deadline_s = deadline_s if full_deadline_s is None else full_deadline_s
        self._engine_id, self._shard = "", 0
        self._incarnation = 1 + secrets.randbelow(MAX_INCARNATION - 1)
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
        self._told_dropped = 0
        self._telling_dropped: int | None = None
        self._progress_at = self._heard_at = self._resent_at = time.monotonic()
        self._dialer = Dialer(endpoint, keys)
        self._shm_sender = (
            ShmSender(window_bytes, _MESSAGE_BYTES) if is_loopback(endpoint) else None
        )
        self._context = zmq.Context()
        self._socket = self._dialer.dial(self._context)

    # --- what an engine says

    def register(
        self,
        engine_id: str,
        layout: RecordLayout,
        kv_scales: Mapping[int, tuple[float, float]] | None = None,
        model: Mapping[str, str] | None = None,
        *,
        shards: Sequence[Shard] = (),
        shard: int = 0,
    ) -> None:
        """Introduce the engine, first of all and once; returns when the bridge has answered.

        Ranks that compute the same tokens are one engine, each with a producer of its own: they say
        the same but for ``shard``, number rows alike (`bridge.index.engine`), and send of each row
        what their shard says. With data-parallel attention every dp rank is an engine.

        Args:
            engine_id: unique to this engine process; row numbers are counted within it.
            layout: what its rows look like.
            kv_scales: attention layer -> global (K, V) scale; absent layers have 1.0.
            model: free text about the model, such as its path.
            shards: what each rank sends of a row (`bridge.layout.rank_shards`); none is one rank.
            shard: which of them this rank sends.
        """
        self._engine_id, self._shard = engine_id, shard
        message = Hello(
            engine_id,
            layout,
            dict(kv_scales or {}),
            dict(model or {}),
            tuple(shards),
            shard,
            self._incarnation,
        )
        self._registration = encode(message, self._next_seq)
        self._send(message)
        self.flush()

    def send_rows(
        self,
        part: Part,
        rows: ArrayLike,
        payload: ArrayLike,
        weight_version: str,
        *,
        copy: bool = True,
        weights: str = "",
    ) -> None:
        """Send records: rows int [n], payload uint8 [n, R], R bytes of this rank's share of a row.

        ``weight_version`` is the label of the weights that computed them, ``weights`` their digest.

        Like all calls it copies what it is given, arrays or CPU tensors, before it returns; with
        ``copy`` false the caller gives the payload away and must not change it again.
        """
        rows_n = np.asarray(rows, dtype=np.int64).copy()
        payload_nR = np.asarray(payload).astype(np.uint8, casting="no", copy=copy)
        step = max(1, _MESSAGE_BYTES // max(1, payload_nR.shape[1]))
        for begin in range(0, len(rows_n), step):
            piece = slice(begin, begin + step)
            message = Rows.of(
                self._engine_id,
                part,
                rows_n[piece],
                payload_nR[piece],
                weight_version,
                self._shard,
                weights,
                self._incarnation,
            )
            self._send(message, part, len(message.header.rows))

    def send_trajectory(
        self,
        trajectory: str,
        start: int,
        tokens: ArrayLike,
        rows: ArrayLike,
        state: TrajectoryState | str,
        *,
        rollout: int = 0,
        continues: bool = False,
    ) -> None:
        """Say which row consumed each token: tokens int [T], rows int [T] (-1: none), from start.

        Row numbers may be sent before or after the rows themselves. ``rollout`` is the number of
        the request, counted up; one that does not ``continues`` the trajectory replaces it.
        """
        self._send(
            Trajectory(
                self._engine_id,
                trajectory,
                start,
                np.asarray(tokens, dtype=np.int32).copy(),
                np.asarray(rows, dtype=np.int64).copy(),
                TrajectoryState(state),
                self._shard,
                rollout,
                continues,
                self._incarnation,
            )
        )

    def send_digests(self, weight_version: str, digests: Mapping[str, str]) -> None:
        """Tell the digests of the quantized weights, tensor name -> hex."""
        self._send(
            WeightDigests(
                self._engine_id, weight_version, dict(digests), self._shard, self._incarnation
            )
        )

    def count_dropped(self, part: Part, rows: int) -> None:
        """Note rows that the engine gave up before they came here; the bridge is told."""
        self.dropped_rows[part] += rows

    # --- waiting and ending

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return self._kept_bytes

    def poll(self, *, may_give_up: bool = True) -> None:
        """Take what the bridge has answered and resend what is due, without waiting.

        Without ``may_give_up`` it raises at the deadline also where rows may be dropped.
        """
        self._tell_dropped()
        self._pump(0.0, may_give_up=may_give_up)
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
        self._tell_dropped()
        while self._kept:
            if end is not None and time.monotonic() >= end:
                raise self._not_acknowledged(timeout_s or 0.0)
            self._pump(0.05, may_give_up=False)
            self._raise_failure()
            self._tell_dropped()

    def close(self) -> None:
        """Close the connection at once; call flush() first to be sure of the last records."""
        self._context.destroy(linger=0)
        if self._shm_sender is not None:
            self._shm_sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self.close()

    # --- the window

    def _send(self, message: Message, part: Part | None = None, rows: int = 0) -> None:
        if not self._registration:
            raise TraceError("the bridge does not know this engine yet; call register() first")
        if self._fenced is not None:
            raise self._fenced
        nbytes = _HEADER_BYTES + sum(memoryview(frame).nbytes for frame in message.frames())
        if self._make_room(nbytes, part):
            in_shm = self._put(message)
            frames = encode(in_shm or message, self._next_seq)
            self._keep_and_send(_Unacknowledged(frames, nbytes, part, rows, in_shm))
        elif part is not None:
            self.dropped_rows[part] += rows
        self._tell_dropped()
        self._pump(0.0)
        self._raise_failure()

    def _put(self, message: Message) -> RowsInShm | None:
        """Put rows where a bridge of this machine reads them; None: they have to be sent."""
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

    def _make_room(self, nbytes: int, part: Part | None) -> bool:
        """Wait until the message fits the window; return False if it is to be dropped instead."""
        window = self._window_bytes
        if self._overflow is Overflow.DROP:
            self._pump(0.0)
            window += window // 4 if part is None else 0
            return not self._kept or self._kept_bytes + nbytes <= window
        while self._kept and self._kept_bytes + nbytes > window:
            self._pump(0.05)
            self._raise_failure()
        return True

    def _tell_dropped(self) -> None:
        """Tell the bridge how many rows are dropped, unless that is told or on its way."""
        total = self.dropped_rows.total()
        if total == self._told_dropped or self._telling_dropped in self._kept:
            return
        counts = self.dropped_rows
        message = Dropped(
            self._engine_id,
            counts[Part.FORWARD],
            counts[Part.KV],
            self._shard,
            self._incarnation,
        )
        self._telling_dropped, self._told_dropped = self._next_seq, total
        frames = encode(message, self._next_seq)
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
        self._keep_and_send(_Unacknowledged(frames, nbytes, None, 0))

    def _pump(self, wait_s: float, *, may_give_up: bool = True) -> None:
        """Handle all answers that are there, waiting for the first; then resend or give up.

        Raises:
            StoreFull, BridgeUnreachable: it is past the deadline, unless what waits may be dropped.
        """
        wait_ms = int(wait_s * 1000)
        while self._kept and self._socket.poll(wait_ms):
            self._handle(self._socket.recv_multipart())
            wait_ms = 0
        now = time.monotonic()
        if self._refused and now - self._refused_at > self._resend_after_s:
            self._send_refused()
        if self._kept and now - max(self._heard_at, self._resent_at) > self._resend_after_s:
            self._resend()
        deadline_s = self._full_deadline_s if self._is_full(now) else self._deadline_s
        if self._kept and now - self._progress_at > deadline_s:
            error = self._not_acknowledged(now - self._progress_at)
            if self._overflow is Overflow.BLOCK or not (self._answered and may_give_up):
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
            rows = sum(self._forget(acknowledged).rows for acknowledged in message.seqs)
            self.acknowledged_rows += rows
            self._full = None if rows else self._full
        elif isinstance(message, Error):
            error = exception(message)
            if isinstance(error, ShmUnreachable | CorruptMessage) and seq != NO_SEQ:
                self._not_read(seq, error)
            elif isinstance(error, UnknownEngine):
                self._begin_again()  # the daemon was restarted without our history
            elif isinstance(error, CorruptMessage) and seq == NO_SEQ:
                log.warning("a message was damaged on its way and is resent: %s", error)
                self._begin_again()
            elif isinstance(error, EngineIdTaken):
                self._fenced = error
                for kept in list(self._kept):
                    self._forget(kept)  # the bridge will never take it
            elif isinstance(error, StoreFull):
                self._refuse(seq, error)
            else:
                self._forget(seq)
                self._failures.append(error)

    def _not_read(self, seq: int, error: TraceError) -> None:
        """Send rows themselves that the bridge could not read where they stand."""
        kept = self._kept.get(seq)
        if kept is None:
            return  # a copy of a message that was answered before
        if kept.in_shm is None or self._shm_sender is None:
            self._forget(seq)
            self._failures.append(error)
            return
        if isinstance(error, ShmUnreachable):
            self._shm_sender.stop()
        frames = encode(self._shm_sender.reclaim(kept.in_shm), seq)
        self._kept[seq] = replace(kept, frames=frames, in_shm=None)
        queue_for_sending(self._socket, frames)

    def _refuse(self, seq: int, error: StoreFull) -> None:
        """The store is full: give the message up, or keep it for another try a little later."""
        if self._full is None:
            log.warning("the engine %ss records: %s", self._overflow.value, error)
        self._full = error
        self._refused_at = time.monotonic()
        kept = self._kept.get(seq)
        if self._overflow is Overflow.DROP and kept is not None and kept.part is not None:
            self.dropped_rows[kept.part] += self._forget(seq).rows
        else:
            self._refused.add(seq)

    def _send_refused(self) -> None:
        """Try again what the full store refused; the rest is on its way."""
        for seq in sorted(self._refused & self._kept.keys()):
            queue_for_sending(self._socket, self._kept[seq].frames)
        self._refused.clear()
        self._resent_at = time.monotonic()

    def _begin_again(self) -> None:
        """Begin with the hello, unless that was done a moment ago."""
        if time.monotonic() - self._resent_at > _HELLO_PAUSE_S:
            self._resend()

    def _forget(self, seq: int) -> _Unacknowledged:
        """Let go of a message that was answered and return it; an empty one if it was before."""
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
        """Send the hello and everything unacknowledged over a new connection.

        A new one, because the queue of the old one may hold copies of the same messages.
        """
        self._socket.close(linger=0)
        self._socket = self._dialer.dial(self._context)
        for frames in (self._registration, *(kept.frames for kept in self._kept.values())):
            queue_for_sending(self._socket, frames)
        self._refused.clear()
        self._resent_at = time.monotonic()

    def _is_full(self, now: float) -> bool:
        """Whether the bridge lives and says that its store is full."""
        return self._full is not None and now - self._heard_at <= 2 * self._resend_after_s

    def _not_acknowledged(self, waited_s: float) -> StoreFull | BridgeUnreachable:
        """Return why nothing was acknowledged: the store is full, or else nobody answers."""
        if self._is_full(time.monotonic()):
            return StoreFull(
                f"the bridge at {self.endpoint} took nothing for {waited_s:.3g} s because it is "
                f"full ({len(self._kept)} messages wait): {self._full}"
            )
        return BridgeUnreachable(
            f"no bridge acknowledged anything at {self.endpoint} for {waited_s:.3g} s "
            f"({len(self._kept)} messages wait); {self._dialer.remedy()}"
        )
