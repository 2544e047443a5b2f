"""Names of strangers count as memory of the index."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from bridge.index import Catalog
from bridge.index.catalog import JournalRecord
from bridge.layout import Part, RecordLayout
from bridge.store.journal import pack, unpack
from bridge.wire import Hello, Pin, RowsHeader, Trajectory, TrajectoryState, WeightDigests

_ROW = np.zeros(1, np.int64)
Make = Callable[[RecordLayout, str], JournalRecord]


def _hello(layout: RecordLayout, name: str) -> JournalRecord:
    return Hello(name, layout, {}, {"path": name})


def _trajectory(layout: RecordLayout, name: str) -> JournalRecord:
    return Trajectory("e", name, 0, np.zeros(1, np.int32), _ROW, TrajectoryState.OPEN)


def _block(layout: RecordLayout, name: str) -> JournalRecord:
    return RowsHeader("e", Part.FORWARD, name, layout.row_bytes(Part.FORWARD), _ROW)


def _digests(layout: RecordLayout, name: str) -> JournalRecord:
    return WeightDigests("e", "v", {name: name})


def _pin(layout: RecordLayout, name: str) -> JournalRecord:
    return Pin((name,), 60)


@pytest.mark.parametrize("make", [_hello, _trajectory, _block, _digests, _pin])
@pytest.mark.parametrize("filler", ["a", "\u20ac", "\U0001f600"])
def test_what_long_names_take_is_counted(layout: RecordLayout, make: Make, filler: str) -> None:
    catalog = Catalog()
    catalog.apply(Hello("e", layout), 0, 0)
    catalog.apply(_block(layout, "first"), 0, 1)  # makes the places of many rows
    headers = [pack(make(layout, f"{n:04d}" + filler * 900), n) for n in range(2, 302)]
    unpack(headers[0])
    before = catalog.nbytes()
    tracemalloc.start()
    try:
        for number, header in enumerate(headers, start=2):
            told, seq = unpack(header)
            assert isinstance(told, JournalRecord)
            pack(told, seq)
            catalog.apply(told, seq, number)
        del told
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= 1.25 * (catalog.nbytes() - before)
