"""The engine's side: send records, keep them until the bridge holds them.

Shapes: n = rows of one call, R = bytes of a row, T = tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import zmq
from numpy.typing import ArrayLike

from bridge.errors import BridgeUnreachable, TraceError
from bridge.index import UnknownEngine
from bridge.layout import Part, RecordLayout
from bridge.refusal import exception
from bridge.wire import (
    Ack,
    Error,
    Hello,
    Message,
    Rows,
    Trajectory,
    TrajectoryState,
    WeightDigests,
    decode,
    encode,
)
from bridge.wire.envelope import Buffer

_MESSAGE_BYTES = 8 << 20
# A daemon that refuses the hello refuses all that follows: do not send the window at line rate.
_HELLO_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class _Unacknowledged:
    frames: list[Buffer]
    nbytes: int
    rows: int


class RecordProducer:
    """One engine's connection to a bridge; use it from one thread.

    Every message is kept until it is acknowledged and sent again after ``resend_after_s`` without
    progress, also to a daemon that was restarted at the same endpoint. At most ``window_bytes`` are
    kept (or one message, if larger): a call that would exceed them waits.

    Every call may raise, for itself or for an earlier message:
        BridgeUnreachable: nothing was acknowledged for ``deadline_s``; what is kept is tried again
            by the next call. Whether the call's own message is kept is open: repeat it, a row or
            trajectory that arrives twice is harmless.
        StoreFull: messages were refused and dropped; ``refused_rows`` counts their rows.
        SchemaMismatch: the bridge runs another version, or rows do not fit the hello.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        window_bytes: int = 64 << 20,
        resend_after_s: float = 2.0,
        deadline_s: float = 30.0,
    ) -> None:
        self.endpoint = endpoint
        self.acknowledged_rows = 0
        self.refused_rows = 0
        self._window_bytes = window_bytes
        self._resend_after_s = resend_after_s
        self._deadline_s = deadline_s
        self._engine_id = ""
        self._hello: list[Buffer] = []
        self._next_seq = 0
        self._kept: dict[int, _Unacknowledged] = {}
        self._kept_bytes = 0
        self._failures: list[TraceError] = []
        self._progress_at = self._resent_at = time.monotonic()
        self._context = zmq.Context()
        self._socket = self._connect()

    # --- what an engine says

    def hello(
        self,
        engine_id: str,
        layout: RecordLayout,
        kv_scales: Mapping[int, tuple[float, float]] | None = None,
        model: Mapping[str, str] | None = None,
    ) -> None:
        """Introduce the engine, first of all and once; returns when the bridge has answered.

        Args:
            engine_id: unique to this engine process; row numbers are counted within it.
            layout: what its rows look like.
            kv_scales: attention layer -> global (K, V) scale; absent layers have 1.0.
            model: free text about the model, such as its path.
        """
        self._engine_id = engine_id
        message = Hello(engine_id, layout, dict(kv_scales or {}), dict(model or {}))
        self._hello = encode(message, self._next_seq)
        self._send(message)
        self.flush()

    def send_rows(
        self, part: Part, rows: ArrayLike, payload: ArrayLike, weight_version: str
    ) -> None:
        """Send records: rows int [n], payload uint8 [n, R].

        Like all calls it copies what it is given, arrays or CPU tensors, before it returns.
        """
        rows_n = np.asarray(rows, dtype=np.int64).copy()
        payload_nR = np.asarray(payload).astype(np.uint8, casting="no")
        step = max(1, _MESSAGE_BYTES // max(1, payload_nR.shape[1]))
        for begin in range(0, len(rows_n), step):
            piece = slice(begin, begin + step)
            message = Rows.of(
                self._engine_id, part, rows_n[piece], payload_nR[piece], weight_version
            )
            self._send(message, rows=len(message.block.rows))

    def send_trajectory(
        self,
        trajectory: str,
        start: int,
        tokens: ArrayLike,
        rows: ArrayLike,
        state: TrajectoryState | str,
    ) -> None:
        """Say which row consumed each token: tokens int [T], rows int [T] (-1: none), from start.

        Row numbers may be sent before or after the rows themselves.
        """
        self._send(
            Trajectory(
                self._engine_id,
                trajectory,
                start,
                np.asarray(tokens, dtype=np.int32).copy(),
                np.asarray(rows, dtype=np.int64).copy(),
                TrajectoryState(state),
            )
        )

    def send_digests(self, weight_version: str, digests: Mapping[str, str]) -> None:
        """Tell the digests of the quantized weights, tensor name -> hex."""
        self._send(WeightDigests(self._engine_id, weight_version, dict(digests)))

    # --- waiting and ending

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return self._kept_bytes

    def poll(self) -> None:
        """Take what the bridge has answered and resend what is due, without waiting."""
        self._pump(0.0)
        self._raise_failure()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is acknowledged; BridgeUnreachable after ``timeout_s``."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._kept:
            if end is not None and time.monotonic() >= end:
                raise self._unreachable(timeout_s or 0.0)
            self._pump(0.05)
            self._raise_failure()

    def close(self) -> None:
        """Close the connection at once; call flush() first to be sure of the last records."""
        self._context.destroy(linger=0)

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

    def _send(self, message: Message, rows: int = 0) -> None:
        if not self._hello:
            raise TraceError("the bridge does not know this engine yet; call hello() first")
        frames = encode(message, self._next_seq)
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
        self._make_room(nbytes)
        if not self._kept:
            self._progress_at = time.monotonic()
        self._kept[self._next_seq] = _Unacknowledged(frames, nbytes, rows)
        self._kept_bytes += nbytes
        self._next_seq += 1
        self._socket.send_multipart(frames, copy=False)
        self._pump(0.0)
        self._raise_failure()

    def _make_room(self, nbytes: int) -> None:
        while self._kept and self._kept_bytes + nbytes > self._window_bytes:
            self._pump(0.05)
            self._raise_failure()

    def _pump(self, wait_s: float) -> None:
        """Handle all answers that are there, waiting for the first; then resend or give up."""
        wait_ms = int(wait_s * 1000)
        while self._kept and self._socket.poll(wait_ms):
            self._handle(self._socket.recv_multipart())
            wait_ms = 0
        now = time.monotonic()
        if self._kept and now - max(self._progress_at, self._resent_at) > self._resend_after_s:
            self._resend()
        if self._kept and now - self._progress_at > self._deadline_s:
            raise self._unreachable(self._deadline_s)

    def _handle(self, frames: list[bytes]) -> None:
        message, seq = decode(frames)
        if isinstance(message, Ack):
            self.acknowledged_rows += self._forget(seq)
        elif isinstance(message, Error):
            error = exception(message)
            if isinstance(error, UnknownEngine):
                self._introduce_again()
            else:
                self.refused_rows += self._forget(seq)
                self._failures.append(error)

    def _introduce_again(self) -> None:
        """Begin with the hello: the daemon was restarted without our history."""
        if time.monotonic() - self._resent_at > _HELLO_PAUSE_S:
            self._resend()

    def _forget(self, seq: int) -> int:
        """Drop a message that was answered; return how many rows it had."""
        kept = self._kept.pop(seq, None)
        if kept is None:
            return 0
        self._kept_bytes -= kept.nbytes
        self._progress_at = time.monotonic()
        return kept.rows

    def _raise_failure(self) -> None:
        if self._failures:
            first, self._failures = self._failures[0], []
            raise first

    # --- the socket

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)  # the window bounds what is queued, in bytes
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.connect(self.endpoint)
        return socket

    def _resend(self) -> None:
        """Send the hello and everything unacknowledged over a new connection.

        A new one, because the queue of the old one may hold copies of the same messages.
        """
        self._socket.close(linger=0)
        self._socket = self._connect()
        for frames in (self._hello, *(kept.frames for kept in self._kept.values())):
            self._socket.send_multipart(frames, copy=False)
        self._resent_at = time.monotonic()

    def _unreachable(self, waited_s: float) -> BridgeUnreachable:
        return BridgeUnreachable(
            f"no bridge acknowledged anything at {self.endpoint} for {waited_s:g} s "
            f"({len(self._kept)} messages wait); start it: python -m bridge serve "
            f"--endpoint {self.endpoint}"
        )
