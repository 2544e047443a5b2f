"""Routes rows to one of several bridges, from their forward pass until they are shipped.

A row goes to the bridge that owns its trajectory
(`bridge.transport.bridge_sharding`), and its number says so, which is how the ledger, the K and V
that follow later and the bridges know it.

Shape legend: n rows.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, islice

import torch
from torch import Tensor

from bridge.transport.bridge_sharding import row_number
from sglang_trace.capture.ledger import Span


class RowRouter:
    """Knows the bridge of each of one engine's rows, in the order of their counts."""

    def __init__(self, bridges: int) -> None:
        self._bridges = bridges
        # (count of the first row behind it, shard) of every span that has not been shipped whole.
        self._spans: deque[tuple[int, int]] = deque()

    def keep(self, first: int, spans: list[Span]) -> None:
        """Note that the rows of these spans, counted from `first`, are still to be shipped."""
        if self._bridges > 1:
            ends = accumulate((span.length for span in spans), initial=first)
            self._spans.extend(zip(islice(ends, 1, None), (s.shard for s in spans), strict=True))

    def numbers(self, first: int, count: int) -> Tensor:
        """Return the numbers of the next rows to be shipped, counted from `first`: int64 [n]."""
        rows_n = torch.arange(first, first + count)
        at, end = first, first + count
        while self._spans and at < end:
            stop, shard = self._spans[0]
            rows_n[at - first : stop - first] = torch.arange(
                row_number(at, shard), row_number(min(stop, end), shard)
            )
            at = min(stop, end)
            if stop <= end:
                self._spans.popleft()
        return rows_n
