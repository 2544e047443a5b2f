"""Which row consumed which token: the book that turns KV slots and forward passes into row numbers.

A row is one computed token. Rows are counted in the order they are computed, 0, 1, 2, ..., which
all processes of a tensor-parallel group do alike, because they run the same batches. The ledger
knows, for every KV slot, the row whose K and V lie in it, and for every running request the rows
that it computed itself.

Both are needed. Positions that a request found in the prefix cache have no row of its own: their
row is the one that filled the slot. Positions that it computed keep their own row even when the
prefix cache afterwards swaps their slot for an equal one of another request, because it is the own
row that produced the sampled token.

All methods are called on the scheduler's thread in the order of the forward passes, so the state
is that of the last forward pass launched, which overlap scheduling may have launched before the
result of the one before it is looked at. That pass only writes slots that nobody else reads.

Shape legend: S slots of the KV pool, n rows of a forward pass, T positions of a request.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bridge.transport.bridge_sharding import row_number

NO_ROW = -1


@dataclass(frozen=True)
class Span:
    """`length` consecutive positions of a request from `position` on.

    `request` tells it from all others of the engine, which its `rid` does not: the number of its
    `Rollout`. `shard` is the bridge that the rows go to, which is part of a row's number
    (`bridge.transport.bridge_sharding`).
    """

    request: Hashable
    position: int
    length: int
    shard: int = 0


class Ledger:
    """Slot to row, and request to own rows. `device` is where slots are looked up."""

    def __init__(self, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.next_row = 0
        self._row_of_slot = torch.full((num_slots,), NO_ROW, dtype=torch.int64, device=device)
        self._kv_sent = torch.zeros(num_slots, dtype=torch.bool, device=device)
        # (position, first row, length) after each other, as int64: as long as the reply.
        self._own: defaultdict[Hashable, array[int]] = defaultdict(lambda: array("q"))

    def record(self, slots_n: Tensor, spans: list[Span]) -> int:
        """Number the rows of a forward pass that filled `slots_n`; returns the first one's count.

        The slots may lie on a GPU, which is not waited for.
        `spans` say which positions of which requests the rows are, in order. Rows of padding
        (slot 0, which no request ever owns) are numbered and referred to by nobody.
        """
        first = row = self.next_row
        self.next_row += len(slots_n)
        slots_n = slots_n.long()
        rows_n = torch.arange(first, self.next_row, device=slots_n.device)
        if any(span.shard for span in spans):
            rows_n += _shard_bits(spans, len(slots_n), slots_n.device)
        self._row_of_slot.index_copy_(0, slots_n, rows_n)
        # Not by assignment: that copies the number from the host, and waits.
        self._kv_sent.index_fill_(0, slots_n, False)
        for span in spans:
            self._own[span.request].extend(
                (span.position, row_number(row, span.shard), span.length)
            )
            row += span.length
        return first

    def read(self, request: Hashable, slots_T: Tensor) -> Tensor:
        """Return the rows of positions 0 to T of a request whose slots are `slots_T`: int64 [T].

        NO_ROW where none was recorded. They lie where the slots lie, and a GPU is not waited for.
        """
        slot_rows_T = self._row_of_slot[slots_T]
        own_T = self.own_rows(request, len(slots_T))
        if slots_T.is_cuda:
            # Only from pinned memory does a copy not wait.
            own_T = own_T.pin_memory().to(slots_T.device, non_blocking=True)
        return torch.where(own_T == NO_ROW, slot_rows_T, own_T)

    def take_due_kv(self, rows_T: Tensor, slots_T: Tensor) -> Tensor:
        """Return which positions' K and V have not been sent under their row: bool [T].

        The caller sends them; they count as sent from here on.
        """
        holds_T = rows_T == self._row_of_slot[slots_T]
        due_T = (rows_T != NO_ROW) & ~(holds_T & self._kv_sent[slots_T])
        self._kv_sent[slots_T] |= holds_T
        return due_T

    def own_rows(self, request: Hashable, length: int) -> Tensor:
        """Return the rows that a request computed itself at positions 0 to `length`: int64."""
        rows_T = np.full(length, NO_ROW)
        # An entry a decode step: all of them at once.
        entries = np.array(self._own.get(request, array("q")), dtype=np.int64)
        position, first, count = entries.reshape(-1, 3).T
        within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        positions, rows = (np.repeat(start, count) + within for start in (position, first))
        asked = positions < length
        rows_T[positions[asked]] = rows[asked]
        return torch.from_numpy(rows_T)

    def forget(self, request: Hashable) -> bool:
        """Drop a request's own rows: it finished, aborted or was retracted. True if it had any."""
        return self._own.pop(request, None) is not None


def _shard_bits(spans: list[Span], rows: int, device: torch.device) -> Tensor:
    """Return the bits of the owner shard in each row number: int64 [n]; padding is of shard 0."""
    lengths = [span.length for span in spans]
    shards = torch.tensor([*(row_number(0, span.shard) for span in spans), 0])
    bits_n = shards.repeat_interleave(torch.tensor([*lengths, rows - sum(lengths)]))
    # Only from pinned memory does a copy to a GPU not wait.
    return bits_n if device.type == "cpu" else bits_n.pin_memory().to(device, non_blocking=True)
