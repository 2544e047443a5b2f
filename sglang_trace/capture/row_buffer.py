"""Rows of several forward passes, gathered on the device and shipped together.

A decode step makes few rows, and a message costs the shipper's thread about as much Python, under
the lock that the scheduler's thread needs, whether it has one row or hundreds.

Shape legend: n rows, C rows that a block has room for, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_trace.capture.device_to_host import ready_event

BUFFER_BYTES = 4 << 20


@dataclass(frozen=True)
class Gathered:
    """Rows uint8 [n, B] numbered from `first` on, there once `ready` has happened."""

    first: int
    rows_nB: Tensor
    ready: torch.cuda.Event | None

    def rows(self) -> Tensor:
        """Return the rows."""
        return self.rows_nB

    @property
    def nbytes(self) -> int:
        """Bytes that they keep from being used again: those of a whole block."""
        return self.rows_nB.untyped_storage().nbytes()


class RowBuffer:
    """Takes rows in the order of their numbers, without gaps."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows_CB: Tensor | None = None
        self._first = 0
        self._count = 0
        self._ready: torch.cuda.Event | None = None

    @classmethod
    def on(cls, device: torch.device | str, row_bytes: int) -> RowBuffer:
        """Return a block for rows on this device; on a CPU every pass is one of its own."""
        on_gpu = torch.device(device).type == "cuda"
        return cls(BUFFER_BYTES // max(1, row_bytes) if on_gpu else 0)

    def add(self, first: int, rows_nB: Tensor) -> list[Gathered]:
        """Copy the rows of a pass; returns what has to be shipped now.

        On a GPU the copy runs on the current stream, before the next pass writes where they lie.
        """
        full = self.take() if self._count + len(rows_nB) > self._capacity else []
        if len(rows_nB) >= self._capacity:
            copy_nB = rows_nB.clone()
            return [*full, Gathered(first, copy_nB, ready_event(copy_nB))]
        if self._rows_CB is None:
            self._rows_CB = rows_nB.new_empty((self._capacity, rows_nB.shape[1]))
            self._first = first
        self._rows_CB[self._count : self._count + len(rows_nB)].copy_(rows_nB)
        self._count += len(rows_nB)
        # Now: `take` may be called under another stream.
        self._ready = ready_event(rows_nB)
        return full

    def take(self) -> list[Gathered]:
        """Return what is in the block, if anything, and begin a new one."""
        if self._rows_CB is None:
            return []
        taken = Gathered(self._first, self._rows_CB[: self._count], self._ready)
        self._rows_CB, self._count = None, 0
        return [taken]
