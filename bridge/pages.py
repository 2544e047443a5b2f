"""Join the pages of one trajectory into tensors, each byte copied once.

Shapes: T = positions asked for, P = positions of a page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridge.errors import CorruptMessage, TraceError
from bridge.records import TrajectoryRecords
from bridge.wire import FetchReply

# Token, row number, two flags and two table indices.
_POSITION_BYTES = 22


def join(pages: Iterator[FetchReply], stop: int | None) -> TrajectoryRecords:
    """Return the records of consecutive pages (one at least) of one revision of a trajectory.

    The tensors are made for all positions when the first page is there, and every page is copied
    while the next ones travel. ``stop`` is the fetch's.

    Raises:
        TraceError: they do not fit this machine's memory.
    """
    first = next(pages)
    end = first.length if stop is None else min(stop, first.length)
    total = max(end - first.start, len(first.tokens))
    _require_memory(total, first)
    tokens = torch.empty(total, dtype=torch.int32)
    rows = torch.empty(total, dtype=torch.int64)
    forward = torch.empty(total, first.forward.shape[1], dtype=torch.uint8)
    kv = torch.empty(total, first.kv.shape[1], dtype=torch.uint8)
    forward_valid, kv_valid = (torch.empty(total, dtype=torch.bool) for _ in range(2))
    versions, engines = _NameTable(total), _NameTable(total)
    at = 0
    page: FetchReply | None = first
    while page is not None:
        here = slice(at, at + len(page.tokens))
        if here.stop > total or page.layout != first.layout:
            raise CorruptMessage("a page is none of those that were asked for; fetch again")
        tokens.numpy()[here], rows.numpy()[here] = page.tokens, page.rows
        forward.numpy()[here], kv.numpy()[here] = page.forward, page.kv
        forward_valid.numpy()[here], kv_valid.numpy()[here] = page.forward_valid, page.kv_valid
        versions.put(here, page.weight_versions, page.versions)
        engines.put(here, page.engine_ids, page.engines)
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
        forward=forward,
        forward_valid=forward_valid,
        kv=kv,
        kv_valid=kv_valid,
        weight_versions=versions.names,
        weight_version_index=versions.index_T,
        engine_ids=engines.names,
        engine_index=engines.index_T,
        rows=rows,
        revision=first.revision,
    )


def _require_memory(total: int, page: FetchReply) -> None:
    """Raise TraceError if so many positions are more than this machine has room for."""
    needed = total * (page.layout.bytes_per_token() + _POSITION_BYTES)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise TraceError(
            f"{total} positions of trajectory {page.trajectory!r} take {needed} bytes and this "
            f"machine has {memory}; fetch a part of them (start, stop) or fewer layers and sites"
        )


class _NameTable:
    """One table of names for all pages and the index into it int32 [T]; -1 stays -1."""

    def __init__(self, total: int) -> None:
        self._places: dict[str, int] = {}
        self.index_T: Tensor = torch.empty(total, dtype=torch.int32)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def put(self, here: slice, names: tuple[str, ...], index_P: NDArray[np.int32]) -> None:
        places = [self._places.setdefault(name, len(self._places)) for name in names]
        # The last entry is what index -1 finds.
        self.index_T.numpy()[here] = np.array([*places, -1], dtype=np.int32)[index_P]
