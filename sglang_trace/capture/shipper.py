"""One thread that sends records to the bridge, so that the scheduler never waits for a socket.

The queue between the two is bounded in bytes. When the bridge cannot keep up the queue fills. The
scheduler then waits in `put` or, with `Overflow.DROP`, drops rows; the thread reports their number
to the bridge. An error on the thread is kept and raised from the scheduler's next call, where it
ends the server.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from bridge.errors import TraceError
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import Overflow, RecordProducer
from sglang_trace.capture.device_to_host import HostCopy
from sglang_trace.capture.events import (
    DigestsEvent,
    DroppedEvent,
    DueRowsEvent,
    Event,
    RowsEvent,
    TrajectoryEvent,
)
from sglang_trace.capture.nan_check import NonFiniteRows, rollout_computed_nan

QUEUE_BYTES = 256 << 20
IDLE_POLL_S = 0.1
CLOSE_TIMEOUT_S = 20.0


class ShipperFailed(TraceError):
    """The thread met an error that is not one of ours."""


class Shipper:
    """Owns the producer: it is connected, used and closed on the shipper's thread."""

    def __init__(
        self,
        connect: Callable[[], RecordProducer],
        introduce: Callable[[RecordProducer], None],
        layout: RecordLayout,
        overflow: Overflow = Overflow.BLOCK,
    ) -> None:
        self._overflow = overflow
        self._dropped: Counter[Part] = Counter()
        self._non_finite = NonFiniteRows(layout)
        self._host_copy = HostCopy()
        self._queue: deque[Event] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._failure: TraceError | None = None
        self._connected = False
        self._closing = False
        self._busy = False
        self._thread = threading.Thread(
            target=self._run, args=(connect, introduce), name="trace-shipper", daemon=True
        )
        self._thread.start()
        self._wait(lambda: self._connected)

    def put(self, event: Event) -> None:
        """Queue an event, waiting or dropping while the queue is full; raises what was met."""
        kept: Event | None = event
        if self._overflow is Overflow.BLOCK:
            self._wait(lambda: self._fits(event, QUEUE_BYTES))
        else:
            kept = self._kept(event)
        if kept is not None:
            with self._changed:
                self._queue.append(kept)
                self._queued_bytes += kept.nbytes
                self._changed.notify_all()

    def _fits(self, event: Event, limit: int) -> bool:
        return not self._queue or self._queued_bytes + event.nbytes <= limit

    def _kept(self, event: Event) -> Event | None:
        """Return what is queued instead of the event if the queue is full, None if nothing is.

        What is not rows is small and may fill more.
        """
        self.check()
        is_rows = isinstance(event, RowsEvent | DueRowsEvent)
        with self._changed:
            if self._fits(event, QUEUE_BYTES if is_rows else QUEUE_BYTES * 5 // 4):
                return event
            if isinstance(event, RowsEvent):
                self._dropped[event.part] += len(event.rows_n)
        return event.dropped() if isinstance(event, DueRowsEvent) else None

    def check(self) -> None:
        """Raise what the thread met, if anything."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Send what is queued, wait for the acknowledgements and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or ready())
        self.check()

    def _run(
        self,
        connect: Callable[[], RecordProducer],
        introduce: Callable[[RecordProducer], None],
    ) -> None:
        try:
            with connect() as producer:
                introduce(producer)
                with self._changed:
                    self._connected = True
                    self._changed.notify_all()
                while (event := self._next(producer)) is not None:
                    self._send(producer, event)
                self._tell_dropped(producer)
        except TraceError as error:
            self._fail(error)
        except Exception as error:
            self._fail(
                ShipperFailed(
                    f"Sending records failed ({type(error).__name__}: {error}): "
                    "report it with the server's log."
                )
            )

    def _fail(self, error: TraceError) -> None:
        with self._changed:
            self._failure = error
            self._queue.clear()
            self._changed.notify_all()

    def _next(self, producer: RecordProducer) -> Event | None:
        """Return the next event, None when closing and all are sent."""
        while True:
            with self._changed:
                if not self._queue and not self._closing:
                    self._changed.wait(IDLE_POLL_S)
                if self._queue:
                    event = self._queue.popleft()
                    self._queued_bytes -= event.nbytes
                    self._changed.notify_all()
                    return event
                if self._closing:
                    return None
            # Idle: take acknowledgements, resend what was lost.
            producer.poll()

    def _tell_dropped(self, producer: RecordProducer) -> None:
        with self._changed:
            dropped, self._dropped = self._dropped, Counter()
        for part, rows in dropped.items():
            producer.count_dropped(part, rows)

    def _send(self, producer: RecordProducer, event: Event) -> None:
        self._tell_dropped(producer)
        match event:
            case RowsEvent():
                # On a CPU `encode` has made these bytes for this call alone; from a GPU they come
                # through pinned memory that the next piece overwrites.
                reused, first = event.ready is not None, 0
                for rows_nB in self._host_copy.to_host(event.encode(), event.ready):
                    self._non_finite.refuse(event.part, rows_nB)
                    rows_n = event.rows_n[first : first + len(rows_nB)]
                    producer.send_rows(
                        event.part,
                        rows_n,
                        rows_nB,
                        event.weights.label,
                        copy=reused,
                        weights=event.weights.digest,
                    )
                    first += len(rows_nB)
            case DueRowsEvent():
                self._send_due(producer, event)
            case DroppedEvent():
                count = int(self._host_copy.to_host_copy(event.count_1, event.ready))
                producer.count_dropped(event.part, count)
            case TrajectoryEvent():
                rows_T = self._host_copy.to_host_copy(event.rows_T, event.ready)
                producer.send_trajectory(
                    event.trajectory,
                    0,
                    event.tokens_T,
                    rows_T,
                    event.state,
                    rollout=event.rollout,
                    continues=event.continues,
                )
            case DigestsEvent():
                producer.send_digests(event.weight_version, event.digests)

    def _send_due(self, producer: RecordProducer, event: DueRowsEvent) -> None:
        due = event.due
        count = int(self._host_copy.to_host_copy(due.count_1, event.ready))
        if count == 0:
            return
        if nan := int(self._host_copy.to_host_copy(due.nan_1, event.ready)):
            raise rollout_computed_nan(*due.sites[nan - 1])
        rows_n, first = self._host_copy.to_host_copy(due.rows_n[:count], event.ready), 0
        for rows_mB in self._host_copy.to_host(due.rows_nB[:count], event.ready):
            rows_m = rows_n[first : first + len(rows_mB)]
            for weights, mask_m in event.split(rows_m):
                mine_m, label = rows_m[mask_m], weights.label
                producer.send_rows(Part.KV, mine_m, rows_mB[mask_m], label, weights=weights.digest)
            first += len(rows_mB)
