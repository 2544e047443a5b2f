"""The engine's side of several bridges: rows go to their home, all else where it is needed.

Shapes: n = rows of one call, R = bytes of a row, T = tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bridge.errors import TraceError
from bridge.layout import Part, RecordLayout, Shard
from bridge.producer.producer import RecordProducer
from bridge.transport.bridge_sharding import shard_of, shards_of
from bridge.wire import TrajectoryState

_LOOK_S = 0.01


class RecordProducers:
    """One engine's connections to several bridges.

    They are in the order of `bridge.transport.bridge_sharding`.

    Use it from one thread. Rows are numbered with their home, which alone gets them. A bridge that
    does not take its rows is waited for, or with ``Overflow.DROP`` misses them, as `RecordProducer`
    says; the others get theirs. Calls raise what those of `RecordProducer` do.
    """

    def __init__(self, producers: Iterable[RecordProducer]) -> None:
        self._producers = list(producers)

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
        """Introduce the engine to every bridge; returns when all have answered."""
        for producer in self._producers:
            producer.register(engine_id, layout, kv_scales, model, shards=shards, shard=shard)

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
        """Send records, each to its home: rows int [n], payload uint8 [n, R]."""
        rows_n, payload_nR = np.asarray(rows, dtype=np.int64), np.asarray(payload)
        homes_n = shards_of(rows_n)
        for home in self._homes(homes_n):
            here = homes_n == home
            if here.all():
                self._producers[home].send_rows(
                    part, rows_n, payload_nR, weight_version, copy=copy, weights=weights
                )
                return
            self._producers[home].send_rows(
                part, rows_n[here], payload_nR[here], weight_version, copy=False, weights=weights
            )

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
        """Say which row consumed each token, to the trajectory's home and to its rows' homes."""
        rows_T = np.asarray(rows, dtype=np.int64)
        own = shard_of(trajectory, len(self._producers))
        for home in sorted({own, *self._homes(shards_of(rows_T[rows_T >= 0]))}):
            self._producers[home].send_trajectory(
                trajectory, start, tokens, rows_T, state, rollout=rollout, continues=continues
            )

    def send_digests(self, weight_version: str, digests: Mapping[str, str]) -> None:
        """Tell every bridge the digests of the quantized weights, tensor name -> hex."""
        for producer in self._producers:
            producer.send_digests(weight_version, digests)

    def count_dropped(self, part: Part, rows: int) -> None:
        """Note rows that the engine gave up before they came here; the first bridge is told."""
        self._producers[0].count_dropped(part, rows)

    # --- waiting and ending

    @property
    def acknowledged_rows(self) -> int:
        """Rows that their bridges hold."""
        return sum(producer.acknowledged_rows for producer in self._producers)

    @property
    def dropped_rows(self) -> Counter[Part]:
        """Rows that were given up, by part."""
        dropped: Counter[Part] = Counter()
        for producer in self._producers:
            dropped += producer.dropped_rows
        return dropped

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return sum(producer.unacknowledged_bytes for producer in self._producers)

    def poll(self) -> None:
        """Take what the bridges have answered and resend what is due, without waiting."""
        for producer in self._producers:
            producer.poll()

    def flush(self) -> None:
        """Wait until everything is acknowledged, by all bridges at a time."""
        while self.unacknowledged_bytes:
            for producer in self._producers:
                producer.poll(may_give_up=False)
            time.sleep(_LOOK_S)
        for producer in self._producers:
            producer.flush()

    def close(self) -> None:
        """Close all connections at once; call flush() first to be sure of the last records."""
        for producer in self._producers:
            producer.close()

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

    def _homes(self, homes_n: NDArray[np.int64]) -> list[int]:
        """Return which bridges occur; raise TraceError if there is one that is not in the list."""
        homes: list[int] = np.unique(homes_n).tolist()
        if homes and not 0 <= homes[0] <= homes[-1] < len(self._producers):
            raise TraceError(
                f"a row number names bridge {homes[-1]} of {len(self._producers)}; number rows "
                "with bridge.transport.bridge_sharding.row_number and the homes of the "
                "same list of bridges"
            )
        return homes
