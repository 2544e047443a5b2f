"""Row number -> location of its bytes; takes 8 bytes per row and sender for any number of rows.

If the ranks of an engine share its rows, every row has one location per sender. It is complete once
the map has all of them.

A leaf has the locations of 1024 rows, a slab has 1024 leaves. The map makes a leaf when a row of it
arrives. An engine may therefore number rows with gaps, and a huge row number of an untrusted peer
costs one leaf. The map reuses empty leaves.

A location is one number: the store's entry number and, in the last 20 bits, the row's index in the
entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.index.tables.runs import group_indices, runs
from bridge.index.tables.saved import Saved, Snapshot, UnusableCheckpoint, integers, table

LOCATION = np.dtype([("block", "<i8"), ("offset", "<u4")], align=True)

_OFFSET_BITS = 20  # a message has at most 2^20 rows (bridge.wire.ingest.MAX_ROWS)
_LEAF_BITS = 10
_LEAF_ROWS = 1 << _LEAF_BITS
_SLAB_BITS = 10
_SLAB_LEAVES = 1 << _SLAB_BITS
_FEW_LEAVES = 32
_NO_LEAF = -1
_LOCATION_BYTES = 8
_ABSENT = -1


def absent_locations(count: int) -> NDArray[np.void]:
    """Return LOCATION [count] of rows that are not stored: block is -1."""
    locations = np.zeros(count, dtype=LOCATION)
    locations["block"] = -1
    return locations


class RowMap:
    """Locations of one engine's rows of one record part.

    ``rows`` counts the complete rows, ``partial_rows`` the rows that some senders have not sent.
    ``highest`` is each sender's highest row number so far, -1 before the first.
    """

    def __init__(self, senders: int = 1) -> None:
        self._senders = senders
        self._leaf_bytes = _LEAF_ROWS * _LOCATION_BYTES * senders
        self._slabs: list[NDArray[np.int64]] = []
        self._leaf_at: dict[int, int] = {}
        self._made = 0
        self._free: list[int] = []
        self.rows = 0
        self.partial_rows = 0
        self.highest = [-1] * senders

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: the leaves in use, without the empty ends of slabs.

        Each row of ``page_at`` has the number of a leaf and its index in ``pages``.
        """
        made = [slab[:leaves] for slab, leaves in zip(self._slabs, self._made_of(), strict=True)]
        none = np.empty((0, _LEAF_ROWS, self._senders), dtype=np.int64)
        return {
            "pages": np.concatenate([none, *made]),
            "page_at": table(self._leaf_at.items(), 2),
            "free": integers(self._free),
            "rows": self.rows,
            "partial_rows": self.partial_rows,
            "highest": integers(self.highest),
        }

    @classmethod
    def restore(cls, saved: Saved, senders: int) -> Self:
        """Return the map of a snapshot."""
        made = cls(senders)
        leaves = saved.array("pages", np.int64, _LEAF_ROWS, senders)
        for begin in range(0, len(leaves), _SLAB_LEAVES):
            some = leaves[begin : begin + _SLAB_LEAVES]
            made._slabs.append(made._new_slab())
            made._slabs[-1][: len(some)] = some
        made._made = len(leaves)
        made._leaf_at, made._free = saved.pairs("page_at"), saved.integers("free")
        made.rows, made.partial_rows = saved.integer("rows"), saved.integer("partial_rows")
        made.highest = saved.integers("highest")
        if len(made.highest) != senders:
            raise UnusableCheckpoint("the highest row is not known of every sender")
        if sorted([*made._leaf_at.values(), *made._free]) != list(range(made._made)):
            raise UnusableCheckpoint(
                "two leaves of the row map have one index, or an index has no leaf"
            )
        return made

    def put(
        self, rows_N: NDArray[np.int64], block: int, sender: int = 0, *, is_run: bool = False
    ) -> None:
        """Note that ``block`` has a sender's rows at offsets 0..N-1; the newest location counts.

        ``is_run``: the caller knows that row numbers ascend by one.
        """
        locations_N = np.arange(len(rows_N)) + (block << _OFFSET_BITS)
        highest = int(rows_N[-1]) if is_run else int(rows_N.max())
        self.highest[sender] = max(self.highest[sender], highest)
        for number, at in _run_leaves(rows_N) if is_run else _leaves(rows_N):
            leaf = self._leaf(number)
            self._count(leaf, -1)
            leaf[:, sender][rows_N[at] & (_LEAF_ROWS - 1)] = locations_N[at]
            self._count(leaf, 1)

    def find(self, rows_N: NDArray[np.int64]) -> NDArray[np.void]:
        """Return the first sender's LOCATION [N] of complete rows.

        ``block`` is -1 for rows that have not arrived from every sender and for row -1.
        """
        locations_NS = self.find_each(rows_N)
        locations_N = locations_NS[:, 0]
        if self._senders > 1:
            locations_N[(locations_NS["block"] < 0).any(axis=1)] = (-1, 0)
        return locations_N

    def find_each(self, rows_N: NDArray[np.int64]) -> NDArray[np.void]:
        """Return every sender's LOCATION [N, S]; ``block`` is -1 where it has not sent the row."""
        numbers_N = rows_N >> _LEAF_BITS
        breaks_N = np.empty(len(rows_N), dtype=np.bool_)
        breaks_N[1:] = numbers_N[1:] != numbers_N[:-1]
        firsts, lengths = runs(breaks_N)
        leaves = [self._leaf_at.get(number, _NO_LEAF) for number in numbers_N[firsts].tolist()]
        leaves_N = np.array(leaves, dtype=np.int64).repeat(lengths)
        slots_N = rows_N & (_LEAF_ROWS - 1)
        packed_NS = np.full((len(rows_N), self._senders), _ABSENT, dtype=np.int64)
        for slab, at in group_indices(leaves_N >> _SLAB_BITS):
            if slab >= 0:
                packed_NS[at] = self._slabs[slab][leaves_N[at] & (_SLAB_LEAVES - 1), slots_N[at]]
        return _unpacked(packed_NS)

    def delete(self, blocks: NDArray[np.int64]) -> None:
        """Forget all rows of these blocks; free the leaves that become empty."""
        for number, at in list(self._leaf_at.items()):
            leaf = self._at(at)
            gone = np.isin(leaf >> _OFFSET_BITS, blocks)
            self._count(leaf, -1)
            leaf[gone] = _ABSENT
            self._count(leaf, 1)
            if not (leaf >= 0).any():
                del self._leaf_at[number]
                self._free.append(at)

    def growth(self, rows_N: NDArray[np.int64], *, is_run: bool = False) -> int:
        """Return the bytes that `put` of these rows takes at most; exact if they are many."""
        if is_run and len(rows_N) <= _LEAF_ROWS:
            leaves = (int(rows_N[-1]) >> _LEAF_BITS) - (int(rows_N[0]) >> _LEAF_BITS) + 1
            return leaves * self._leaf_bytes
        numbers_N = rows_N >> _LEAF_BITS
        heads = np.concatenate(([0], np.flatnonzero(numbers_N[1:] != numbers_N[:-1]) + 1))
        leaves = len(heads)
        if leaves > _FEW_LEAVES:
            numbers = set(numbers_N[heads].tolist())
            leaves = len(numbers - self._leaf_at.keys()) - len(self._free)
        return max(0, leaves) * self._leaf_bytes

    def nbytes(self) -> int:
        """Return the bytes that the map takes: leaves are reused, but never freed."""
        return self._made * self._leaf_bytes

    def _count(self, leaf: NDArray[np.int64], sign: int) -> None:
        """Add a leaf's rows to the counts; subtract them if ``sign`` is -1."""
        held = leaf >= 0
        if self._senders == 1:
            self.rows += sign * int(np.count_nonzero(held))
            return
        senders_R = np.count_nonzero(held, axis=1)
        complete = int(np.count_nonzero(senders_R == self._senders))
        self.rows += sign * complete
        self.partial_rows += sign * (int(np.count_nonzero(senders_R)) - complete)

    def _leaf(self, number: int) -> NDArray[np.int64]:
        """Return the leaf with this number; make it if it does not exist."""
        at = self._leaf_at.get(number)
        if at is None:
            at = self._leaf_at[number] = self._free.pop() if self._free else self._new_leaf()
            self._at(at)[:] = _ABSENT
        return self._at(at)

    def _new_leaf(self) -> int:
        if self._made == len(self._slabs) << _SLAB_BITS:
            self._slabs.append(self._new_slab())
        self._made += 1
        return self._made - 1

    def _new_slab(self) -> NDArray[np.int64]:
        # Linux maps memory on first use, so a slab costs what its leaves in use cost.
        return np.empty((_SLAB_LEAVES, _LEAF_ROWS, self._senders), dtype=np.int64)

    def _made_of(self) -> Iterator[int]:
        """Yield the number of leaves in use per slab."""
        for begin in range(0, self._made, _SLAB_LEAVES):
            yield min(_SLAB_LEAVES, self._made - begin)

    def _at(self, at: int) -> NDArray[np.int64]:
        leaf: NDArray[np.int64] = self._slabs[at >> _SLAB_BITS][at & (_SLAB_LEAVES - 1)]
        return leaf


def _unpacked(packed: NDArray[np.int64]) -> NDArray[np.void]:
    locations = np.empty(packed.shape, dtype=LOCATION)
    locations["block"] = packed >> _OFFSET_BITS
    locations["offset"] = np.where(packed < 0, 0, packed & ((1 << _OFFSET_BITS) - 1))
    return locations


def _run_leaves(rows_N: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """Yield (leaf number, indices of its rows) for row numbers that ascend by one."""
    first = int(rows_N[0])
    for number in range(first >> _LEAF_BITS, (first + len(rows_N) - 1 >> _LEAF_BITS) + 1):
        begin = (number << _LEAF_BITS) - first
        yield number, slice(max(begin, 0), begin + _LEAF_ROWS)


def _leaves(rows_N: NDArray[np.int64]) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
    """Yield (leaf number, indices of its rows); slices if the row numbers ascend."""
    numbers_N = rows_N >> _LEAF_BITS
    order: NDArray[np.intp] | None = None
    if bool((np.diff(numbers_N) < 0).any()):
        order = np.argsort(numbers_N, kind="stable")
        numbers_N = numbers_N[order]
    bounds = [0, *(np.flatnonzero(np.diff(numbers_N)) + 1).tolist(), len(rows_N)]
    for begin, end in pairwise(bounds):
        chunk = slice(begin, end)
        yield int(numbers_N[begin]), chunk if order is None else order[chunk]
