"""Join the pages of one trajectory into tensors, each byte copied once.

Shape legend: T = positions requested, P = positions of a chunk of a page, V = those of them that
have a row, W = bytes of a row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridge.client.records import TrajectoryRecords
from bridge.errors import CorruptMessage, TraceError
from bridge.layout import Part
from bridge.wire import FetchReply, PageRows

Entry = TypeVar("Entry")

# Token, row number, two flags and two table indices.
_POSITION_BYTES = 22


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it arrives: its head, and its rows, to be read once and to the end."""

    head: FetchReply
    rows: Iterator[PageRows]


def join(pages: Iterator[Page], stop: int | None) -> TrajectoryRecords:
    """Return the records of consecutive pages (one at least) of one revision of a trajectory.

    The tensors are allocated for all positions with the first page. Every chunk is copied while the
    next ones are in flight. ``stop`` is that of the fetch.

    Raises:
        TraceError: they do not fit into this machine's memory.
    """
    page: Page | None = next(pages)
    assert page is not None
    first = page.head
    end = first.length if stop is None else min(stop, first.length)
    total = max(end - first.start, len(first.tokens))
    _require_memory(total, first)
    tokens = torch.empty(total, dtype=torch.int32)
    rows = torch.empty(total, dtype=torch.int64)
    parts = {part: _Part(total, first.layout.row_bytes(part)) for part in Part}
    versions: _Table[tuple[str, str]] = _Table(total)
    engines: _Table[str] = _Table(total)
    at = 0
    while page is not None:
        head = page.head
        here = slice(at, at + len(head.tokens))
        if here.stop > total or head.layout != first.layout:
            raise CorruptMessage("a page does not continue the one before it; fetch again")
        tokens.numpy()[here], rows.numpy()[here] = head.tokens, head.rows
        pairs = tuple(zip(head.weight_versions, head.weights, strict=True))
        versions.put(here, pairs, head.versions)
        engines.put(here, head.engine_ids, head.engines)
        for chunk in page.rows:
            parts[chunk.part].put(at + chunk.begin, chunk.valid, chunk.rows)
        at = here.stop
        page = next(pages, None)
    return TrajectoryRecords(
        trajectory=first.trajectory,
        state=first.state,
        start=first.start,
        length=first.length,
        layout=first.layout,
        kv_scales=first.kv_scales,
        tokens=tokens,
        forward=parts[Part.FORWARD].rows,
        forward_valid=parts[Part.FORWARD].valid,
        kv=parts[Part.KV].rows,
        kv_valid=parts[Part.KV].valid,
        weight_versions=tuple(label for label, _ in versions.entries),
        weight_version_index=versions.index_T,
        engine_ids=engines.entries,
        engine_index=engines.index_T,
        rows=rows,
        revision=first.revision,
        weights=tuple(digest for _, digest in versions.entries),
    )


class _Part:
    """The rows of one part: uint8 [T, W] and bool [T]; every position is put once."""

    def __init__(self, total: int, row_bytes: int) -> None:
        self._rows_TW = np.empty((total, row_bytes), dtype=np.uint8)
        self._valid_T = np.zeros(total, dtype=np.bool_)
        self.rows = torch.from_numpy(self._rows_TW)
        self.valid = torch.from_numpy(self._valid_T)

    def put(self, at: int, valid_P: NDArray[np.bool_], rows_VW: NDArray[np.uint8]) -> None:
        here = slice(at, at + len(valid_P))
        self._valid_T[here] = valid_P
        count = len(rows_VW)
        if valid_P[:count].all():  # none is missing, or the last ones are
            self._rows_TW[at : at + count] = rows_VW
            self._rows_TW[at + count : here.stop] = 0
        else:
            self._rows_TW[here][valid_P] = rows_VW
            self._rows_TW[here][~valid_P] = 0


def _require_memory(total: int, page: FetchReply) -> None:
    """Raise TraceError if the records of ``total`` positions exceed this machine's memory."""
    needed = total * (page.layout.bytes_per_token() + _POSITION_BYTES)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise TraceError(
            f"{total} positions of trajectory {page.trajectory!r} take {needed} bytes and this "
            f"machine has {memory}; fetch a part of them (start, stop) or fewer layers and sites"
        )


class _Table(Generic[Entry]):
    """One table of entries for all pages and the index into it int32 [T]; -1 stays -1."""

    def __init__(self, total: int) -> None:
        self._index: dict[Entry, int] = {}
        self.index_T: Tensor = torch.empty(total, dtype=torch.int32)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._index)

    def put(self, here: slice, entries: tuple[Entry, ...], index_P: NDArray[np.int32]) -> None:
        indices = [self._index.setdefault(entry, len(self._index)) for entry in entries]
        # Index -1 selects the last entry.
        self.index_T.numpy()[here] = np.array([*indices, -1], dtype=np.int32)[index_P]
