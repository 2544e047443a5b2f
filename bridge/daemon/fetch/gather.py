"""Read scattered rows from the store, check each, and copy them into one frame.

Consecutive rows of a block are read as one run. A prompt has a few runs, while every decoded token
is a run of its own, between the rows of other requests. One call copies all runs. To send long runs
without a copy is not faster: the checksum of the frame reads the bytes first, and the socket then
reads them from memory instead of a cache.

Shape legend: N = requested rows, P = those of one chunk, V = the intact ones of these, S = bytes of
the selected columns of a row, C = rows of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bridge.daemon.fetch.copy_rows import copy_rows
from bridge.index.tables.runs import runs
from bridge.observe.logs import Event, event
from bridge.store import Reader, ReadPlan, Run, Store, StoredPayload
from bridge.store.checksums import row_is_intact

log = logging.getLogger(__name__)

# One core writes a frame of this size, and another one sends it from their shared cache.
CHUNK_BYTES = 2 << 20
# Rows in shared memory are not sent, but each chunk takes a message.
SHM_CHUNK_BYTES = 8 << 20

# Payloads, and the first byte and the rows of a run in each of them.
_Found = tuple[list[memoryview], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """P requested rows from ``begin`` on: valid bool [P], and the runs of the valid rows.

    Copy the runs (`bridge.daemon.fetch.copy_rows.copy_rows`) before the iterator goes on.
    """

    begin: int
    valid: NDArray[np.bool_]
    payloads: list[memoryview]
    begins: NDArray[np.int64]
    counts: NDArray[np.int64]
    row_bytes: int
    columns: NDArray[np.int64]
    selected: int

    def copy_to(self, target: memoryview) -> int:
        """Write the valid rows to the start of ``target``; return the number of bytes."""
        copied: int = copy_rows(
            target, self.payloads, self.begins, self.counts, self.row_bytes, self.columns
        )
        return copied

    def rows(self) -> NDArray[np.uint8]:
        """Return the valid rows: uint8 [V, S]."""
        rows_VS = np.empty((int(self.counts.sum()), self.selected), dtype=np.uint8)
        self.copy_to(rows_VS.reshape(-1).data)
        return rows_VS


class Gather:
    """Reads rows and counts damaged ones; a damaged row is a missing row."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.corrupt_rows = 0

    def chunks(
        self,
        row_bytes: int,
        columns: Sequence[slice],
        locations_N: NDArray[np.void],
        chunk_bytes: int | None = None,
    ) -> Iterator[Chunk]:
        """Yield the rows at LOCATION [N] in chunks of at least one row.

        A chunk has at most ``chunk_bytes``; None means CHUNK_BYTES. ``columns`` selects bytes of
        rows of ``row_bytes``; without columns there are no chunks.
        """
        selected = sum(column.stop - column.start for column in columns)
        if selected == 0:
            return
        step = max(1, (chunk_bytes or CHUNK_BYTES) // selected)
        begins = range(0, len(locations_N), step)
        valid_N = locations_N["block"] >= 0
        runs = _Runs.of(locations_N, valid_N, begins)
        columns_K2 = np.array([(c.start, c.stop) for c in columns], dtype=np.int64)
        for begin, found in zip(begins, self._read(runs, row_bytes, valid_N), strict=True):
            yield Chunk(
                begin, valid_N[begin : begin + step], *found, row_bytes, columns_K2, selected
            )

    def rows(
        self, row_bytes: int, columns: Sequence[slice], locations_N: NDArray[np.void]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return (all rows at LOCATION [N], uint8 [N, S]; valid, bool [N]); invalid rows are zero.

        If all rows are valid, the array may be read-only.
        """
        selected = sum(column.stop - column.start for column in columns)
        rows_NS: NDArray[np.uint8] | None = None
        valid_N = np.zeros(len(locations_N), dtype=np.bool_)
        for chunk in self.chunks(row_bytes, columns, locations_N):
            if len(chunk.valid) == len(locations_N) and chunk.valid.all():
                return chunk.rows(), chunk.valid
            if rows_NS is None:
                rows_NS = np.zeros((len(locations_N), selected), dtype=np.uint8)
            at = slice(chunk.begin, chunk.begin + len(chunk.valid))
            valid_N[at] = chunk.valid
            rows_NS[at][chunk.valid] = chunk.rows()
        if rows_NS is None:
            rows_NS = np.zeros((len(locations_N), selected), dtype=np.uint8)
        return rows_NS, valid_N

    def _read(self, runs: _Runs, row_bytes: int, valid_N: NDArray[np.bool_]) -> Iterator[_Found]:
        """Yield the payloads and runs of each chunk; clear ``valid_N`` of lost rows."""
        payloads = self._store.in_memory(runs.blocks.tolist())
        begins = runs.offsets.astype(np.int64) * row_bytes
        if payloads is not None and runs.lie_within(payloads, begins, row_bytes):
            for first, end in pairwise(runs.bounds):
                yield payloads[first:end], begins[first:end], runs.counts[first:end]
            return
        listed = runs.listed()
        with self._store.reader(ReadPlan(row_bytes, listed)) as read:
            for first, end in pairwise(runs.bounds):
                rows = self._intact(read, row_bytes, listed[first:end], valid_N)
                counts = np.array([len(view) // row_bytes for view in rows], dtype=np.int64)
                yield rows, np.zeros_like(counts), counts

    def _intact(
        self, read: Reader, row_bytes: int, runs: Sequence[Run], valid_N: NDArray[np.bool_]
    ) -> list[memoryview]:
        """Return views of the rows of the runs; clear ``valid_N`` of lost rows."""
        rows: list[memoryview] = []
        for run in runs:
            block, first, at, count = run
            held = read(block)
            if held is not None:
                begin = (first - held.first_row) * row_bytes
                end = begin + count * row_bytes
                view = held.payload[begin:end]
                if len(view) == end - begin:
                    if held.checksums is None:
                        rows.append(view)
                    else:
                        rows += self._checked(held, view, run, valid_N)
                    continue
            valid_N[at : at + count] = False
        return rows

    def _checked(
        self, held: StoredPayload, view: memoryview, run: Run, valid_N: NDArray[np.bool_]
    ) -> Iterator[memoryview]:
        """Yield the rows of a run with the expected checksum."""
        assert held.checksums is not None
        block, first, at, count = run
        row_bytes = view.nbytes // count
        begin = first - held.first_row
        expected = held.checksums[begin : begin + count].tolist()
        for index in range(count):
            row = view[index * row_bytes : (index + 1) * row_bytes]
            if index < len(expected) and row_is_intact(block, first + index, row, expected[index]):
                yield row
                continue
            valid_N[at + index] = False
            self.corrupt_rows += 1
            log.warning(
                "row %d of entry %d fails its checksum",
                first + index,
                block,
                extra=event(Event.ROW_DAMAGED, entry=block, row=first + index),
            )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of stored rows; no run crosses a chunk boundary.

    blocks, offsets   the entry of a run, and the index of its first row there
    starts, counts    the index of its first row among the requested ones, and its number of rows
    bounds            the runs of chunk i are those from bounds[i] to bounds[i + 1]
    """

    blocks: NDArray[np.int64]
    offsets: NDArray[np.uint32]
    starts: NDArray[np.intp]
    counts: NDArray[np.int64]
    bounds: list[int]

    @classmethod
    def of(cls, locations_N: NDArray[np.void], held_N: NDArray[np.bool_], begins: range) -> Self:
        """Find the runs of rows at LOCATION [N]; ``held_N`` marks the stored rows."""
        blocks, offsets = locations_N["block"], locations_N["offset"]
        breaks_N = np.empty(len(locations_N), dtype=np.bool_)
        breaks_N[1:] = (blocks[1:] != blocks[:-1]) | (offsets[1:] != offsets[:-1] + np.uint32(1))
        breaks_N[:: begins.step] = True
        starts, counts = runs(breaks_N)
        held = held_N[starts]
        starts = starts[held]
        bounds: list[int] = starts.searchsorted([*begins, len(locations_N)]).tolist()
        return cls(blocks[starts], offsets[starts], starts, counts[held], bounds)

    def lie_within(
        self, payloads: list[memoryview], begins: NDArray[np.int64], row_bytes: int
    ) -> bool:
        """Whether every run ends within its payload."""
        lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
        return bool((begins + self.counts * row_bytes <= lengths).all())

    def listed(self) -> list[Run]:
        """Return the runs as tuples."""
        columns = (self.blocks, self.offsets, self.starts, self.counts)
        return list(zip(*(column.tolist() for column in columns), strict=True))
