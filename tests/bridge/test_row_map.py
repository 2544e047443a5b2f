from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bridge.index import RowMap
from bridge.index.grouping import groups
from bridge.index.sequence_set import SequenceSet

_ROWS = st.lists(st.integers(0, 5000) | st.integers(0, 1 << 62), min_size=1, max_size=40)


def _crcs(rows: np.ndarray) -> np.ndarray:
    return (rows % 65521).astype(np.uint32)


@given(st.lists(_ROWS, max_size=8))
def test_a_row_is_found_where_it_was_put_last(blocks: list[list[int]]) -> None:
    row_map = RowMap()
    expected: dict[int, tuple[int, int]] = {}
    for block, rows in enumerate(blocks):
        row_map.put(np.array(rows), block, _crcs(np.array(rows)), version=block % 3)
        expected.update({row: (block, offset) for offset, row in enumerate(rows)})
    asked = np.array([*expected, -1, 7001, 1 << 61])
    found = row_map.find(asked)
    for row, place in zip(asked.tolist(), found, strict=True):
        block, offset = expected.get(row, (-1, 0))
        assert (place["block"], place["offset"]) == (block, offset)
        if block >= 0:
            assert place["version"] == block % 3
            assert place["crc"] == row % 65521
    assert row_map.rows == len(expected)


def test_a_million_rows_cost_16_bytes_each_and_a_huge_row_number_one_page() -> None:
    row_map = RowMap()
    tracemalloc.start()
    for block in range(1000):
        rows = np.arange(block * 1000, (block + 1) * 1000)
        row_map.put(rows, block, _crcs(rows), 0)
    row_map.put(np.array([1 << 62]), 1000, np.array([1], dtype=np.uint32), 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert row_map.rows == 1_000_001
    assert held < 18 * 1_000_000


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_groups_walk_every_index_once_under_its_key(keys: list[int]) -> None:
    walked = [(key, index) for key, at in groups(np.array(keys, dtype=int)) for index in at]
    assert sorted(walked, key=lambda item: item[1]) == [(k, i) for i, k in enumerate(keys)]


@given(st.sets(st.integers(0, 20_000)), st.integers(0, 20_000))
def test_a_sequence_set_is_a_set(numbers: set[int], asked: int) -> None:
    accepted = SequenceSet()
    for number in numbers:
        accepted.add(number)
        accepted.add(number)
    assert (asked in accepted) == (asked in numbers)
    assert all(number in accepted for number in numbers)
