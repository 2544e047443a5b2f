"""The engine's side: send records to a bridge or several, keep them until a bridge holds them.

Shape legend: n = rows of one call, R = bytes of a row, T = tokens.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bridge.errors import TraceError
from bridge.layout import Part, RecordLayout, Shard
from bridge.producer.link import MESSAGE_BYTES, BridgeLink, LinkOptions, Overflow
from bridge.transport.bridge_sharding import parse_endpoints, shard_of, shards_of
from bridge.wire import Hello, Rows, Trajectory, TrajectoryState, WeightDigests

__all__ = ["Overflow", "RecordProducer"]

_POLL_INTERVAL_S = 0.01


class RecordProducer(AbstractContextManager["RecordProducer"]):
    """One engine's connection to a bridge, or several; use it from one thread.

    ``endpoint`` is one, or a comma-separated list in the order in which trainers name them
    (`bridge.transport.bridge_sharding`). A row goes to the bridge that its number names. ``keys``
    is this client's key file (`bridge.transport.curve_keys`), for bridges that serve with keys.

    Every message is kept until it is acknowledged. It is resent after ``resend_after_s`` without
    progress, to a daemon that restarted at the same endpoint, while the store is full, and after
    damage in transit. For a bridge on loopback, rows of large messages go through shared memory
    (`bridge.producer.shm_sender`) as long as there is room.
    At most ``window_bytes`` are kept for each bridge (or one message, if larger). A call that would
    exceed them waits. With ``Overflow.DROP`` it drops its rows instead, counts them in
    ``dropped_rows`` and reports the count to the bridge. Other messages are small and may exceed
    the window by a quarter before they are dropped too.

    A wait ends ``deadline_s`` after the bridge's last acknowledgement; the answer that the store is
    full is none. ``full_deadline_s`` is another time for that case, for an engine whose trainer
    frees space only now and then. With ``Overflow.DROP`` only `flush` and `register` wait.

    Every call may raise, for itself or for an earlier message:
        StoreFull: the bridge acknowledged nothing for the deadline because its store is full.
        BridgeUnreachable: it acknowledged nothing for ``deadline_s`` for another reason.
            After either, the next call sends the kept messages again, and raises again unless
            something is acknowledged. It is not known whether the call's own message is kept:
            repeat it, a row or trajectory that arrives twice is harmless.
        SchemaMismatch: the bridge runs another version, or rows do not fit the registration.
        EngineIdTaken: another process registered the engine id before; every later call raises
            it too, because the bridge accepts nothing from this process.
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
        full_s = deadline_s if full_deadline_s is None else full_deadline_s
        options = LinkOptions(window_bytes, resend_after_s, deadline_s, overflow, full_s)
        self._links = [self._link(each, keys, options) for each in parse_endpoints(endpoint)]
        self._engine_id, self._shard = "", 0

    def _link(
        self, endpoint: str, keys: str | os.PathLike[str] | None, options: LinkOptions
    ) -> BridgeLink:
        return BridgeLink(endpoint, keys, options)

    # --- messages

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
        """Register the engine, once and before all else; returns when all bridges have answered.

        Ranks that compute the same tokens are one engine, each with a producer of its own. They
        register alike but for ``shard``, number rows alike (`bridge.index.engine`), and send the
        columns of their shard. With data-parallel attention every dp rank is an engine.

        Args:
            engine_id: unique to this engine process; row numbers are counted within it.
            layout: the layout of its rows.
            kv_scales: attention layer -> global (K, V) scale; absent layers have 1.0.
            model: free text about the model, such as its path.
            shards: the columns that each rank sends (`bridge.layout.rank_shards`); none is one
                rank.
            shard: the index of this rank's shard.
        """
        self._engine_id, self._shard = engine_id, shard
        scales, texts = dict(kv_scales or {}), dict(model or {})
        for link in self._links:
            link.register(
                Hello(engine_id, layout, scales, texts, tuple(shards), shard, link.incarnation)
            )

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
        """Send records: rows int [n], payload uint8 [n, R], R bytes of this rank's columns.

        ``weight_version`` is the label of the weights that computed them, ``weights`` their digest.

        Like all calls it copies its arguments, arrays or CPU tensors, before it returns. With
        ``copy`` false the caller gives the payload away and must not change it again.
        """
        rows_n, payload_nR = np.asarray(rows, dtype=np.int64).copy(), np.asarray(payload)
        owners_n = self._owners_of(rows_n)
        for owner in self._owners(owners_n):
            here = owners_n == owner
            if here.all():
                payload_nR = payload_nR.astype(np.uint8, casting="no", copy=copy)
                self._send_rows(owner, part, rows_n, payload_nR, weight_version, weights)
            else:
                own_nR = payload_nR[here].astype(np.uint8, casting="no", copy=False)
                self._send_rows(owner, part, rows_n[here], own_nR, weight_version, weights)

    def _send_rows(
        self,
        owner: int,
        part: Part,
        rows_n: NDArray[np.int64],
        payload_nR: NDArray[np.uint8],
        weight_version: str,
        weights: str,
    ) -> None:
        """Send the rows of one bridge, in messages of at most `MESSAGE_BYTES`."""
        link, step = self._links[owner], max(1, MESSAGE_BYTES // max(1, payload_nR.shape[1]))
        for begin in range(0, len(rows_n), step):
            chunk = slice(begin, begin + step)
            message = Rows.of(
                self._engine_id,
                part,
                rows_n[chunk],
                payload_nR[chunk],
                weight_version,
                self._shard,
                weights,
                link.incarnation,
            )
            link.send(message, part, len(message.header.rows))

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
        """Report the row of each token: tokens int [T], rows int [T] (-1: none), from ``start``.

        Row numbers may be sent before or after the rows themselves. The message goes to the
        trajectory's bridge and to those of its rows. ``rollout`` is the number of the request,
        counted up; one that does not ``continues`` the trajectory replaces it.
        """
        tokens_T = np.asarray(tokens, dtype=np.int32).copy()
        rows_T = np.asarray(rows, dtype=np.int64).copy()
        own = shard_of(trajectory, len(self._links))
        for owner in sorted({own, *self._owners(self._owners_of(rows_T[rows_T >= 0]))}):
            link = self._links[owner]
            link.send(
                Trajectory(
                    self._engine_id,
                    trajectory,
                    start,
                    tokens_T,
                    rows_T,
                    TrajectoryState(state),
                    self._shard,
                    rollout,
                    continues,
                    link.incarnation,
                )
            )

    def send_digests(self, weight_version: str, digests: Mapping[str, str]) -> None:
        """Report the digests of the quantized weights to every bridge, tensor name -> hex."""
        for link in self._links:
            link.send(
                WeightDigests(
                    self._engine_id, weight_version, dict(digests), self._shard, link.incarnation
                )
            )

    def count_dropped(self, part: Part, rows: int) -> None:
        """Count rows that the engine dropped before sending; the first bridge gets the count."""
        self._links[0].count_dropped(part, rows)

    # --- waiting and closing

    @property
    def acknowledged_rows(self) -> int:
        """Rows that the bridges have acknowledged."""
        return sum(link.acknowledged_rows for link in self._links)

    @property
    def dropped_rows(self) -> Counter[Part]:
        """Dropped rows, by part."""
        return sum((link.dropped_rows for link in self._links), Counter())

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return sum(link.unacknowledged_bytes for link in self._links)

    def poll(self) -> None:
        """Process the replies that have arrived and resend what is due, without waiting."""
        for link in self._links:
            link.poll()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all bridges have acknowledged everything, whether rows may be dropped or not.

        Raises:
            StoreFull: not acknowledged after ``timeout_s``, or nothing for the deadline, because
                a bridge's store is full.
            BridgeUnreachable: likewise, for another reason.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in self._waits(end):
            for link in self._links:
                link.poll(may_drop=False)
        for link in self._links:
            link.flush(None if end is None else max(0.0, end - time.monotonic()))

    def _waits(self, end: float | None) -> Iterator[None]:
        """Yield while several bridges are due to acknowledge something, until ``end``."""
        while len(self._links) > 1 and self.unacknowledged_bytes:
            if end is not None and time.monotonic() >= end:
                return
            yield
            time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Close all connections at once; call flush() first to be sure of the last records."""
        for link in self._links:
            link.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def _owners_of(self, rows_n: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each row's bridge: int64 [n]; a single bridge gets all rows."""
        return shards_of(rows_n) if len(self._links) > 1 else np.zeros_like(rows_n)

    def _owners(self, owners_n: NDArray[np.int64]) -> list[int]:
        """Return the shards that occur; raise TraceError for one that is not in the list."""
        if not len(owners_n):
            return []
        first, last = int(owners_n.min()), int(owners_n.max())
        if not 0 <= first <= last < len(self._links):
            raise TraceError(
                f"a row number names bridge {last} of {len(self._links)}; number rows with "
                "bridge.transport.bridge_sharding.row_number and shards of the same list of bridges"
            )
        if first == last:
            return [first]
        owners: list[int] = np.unique(owners_n).tolist()
        return owners
