from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.index import RowMap
from bridge.index.tables.block_table import BlockTable
from bridge.index.tables.runs import group_indices, runs
from bridge.index.tables.sequence_set import SequenceSet

_ROWS = st.lists(st.integers(0, 5000) | st.integers(0, 1 << 62), min_size=1, max_size=40)


# Where the numbers of entries stand after a day, a month at 800 messages a second, and for ever.
_FIRSTS = st.sampled_from([0, (1 << 31) - 3, (1 << 32) - 3, 1 << 42])


@given(st.lists(_ROWS, max_size=8), _FIRSTS)
def test_a_row_is_found_where_it_was_put_last(blocks: list[list[int]], first: int) -> None:
    row_map = RowMap()
    expected: dict[int, tuple[int, int]] = {}
    for block, rows in enumerate(blocks, first):
        row_map.put(np.array(rows), block)
        expected.update({row: (block, offset) for offset, row in enumerate(rows)})
    asked = np.array([*expected, -1, 7001, 1 << 61])
    found = row_map.find(asked)
    for row, place in zip(asked.tolist(), found, strict=True):
        block, offset = expected.get(row, (-1, 0))
        assert (place["block"], place["offset"]) == (block, offset)
    assert row_map.rows == len(expected)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 40), min_size=1, max_size=9))),
    st.sets(st.integers(0, 9)),
)
def test_a_row_of_several_senders_is_complete_once_all_have_sent_it(
    sent: list[tuple[int, list[int]]], dropped: set[int]
) -> None:
    row_map, expected = RowMap(3), np.full((50, 3), -1)
    for block, (sender, rows) in enumerate(sent):
        row_map.put(np.array(rows), block, sender)
        expected[rows, sender] = block
    row_map.delete(np.array(sorted(dropped), dtype=np.int64))
    expected[np.isin(expected, sorted(dropped))] = -1
    asked, complete = np.arange(50), (expected >= 0).all(axis=1)
    np.testing.assert_array_equal(row_map.find_each(asked)["block"], expected)
    np.testing.assert_array_equal(
        row_map.find(asked)["block"], np.where(complete, expected[:, 0], -1)
    )
    assert row_map.rows == complete.sum()
    assert row_map.partial_rows == (expected >= 0).any(axis=1).sum() - complete.sum()


def test_a_million_rows_cost_8_bytes_each_and_a_huge_row_number_one_page() -> None:
    row_map = RowMap()
    tracemalloc.start()
    for block in range(1000):
        rows = np.arange(block * 1000, (block + 1) * 1000)
        row_map.put(rows, block)
    row_map.put(np.array([1 << 62]), 1000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert row_map.rows == 1_000_001
    assert held < 10 * 1_000_000
    assert row_map.nbytes() == pytest.approx(held, rel=0.1)


@given(st.lists(_ROWS, min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_rows_of_dropped_blocks_are_gone_and_the_others_stay(
    blocks: list[list[int]], dropped: set[int]
) -> None:
    row_map = RowMap()
    last = {row: block for block, rows in enumerate(blocks) for row in rows}
    for block, rows in enumerate(blocks):
        row_map.put(np.array(rows), block)
    row_map.delete(np.array(sorted(dropped), dtype=np.int64))
    found = row_map.find(np.array(list(last)))["block"]
    expected = [-1 if block in dropped else block for block in last.values()]
    assert found.tolist() == expected
    assert row_map.rows == sum(block >= 0 for block in expected)
    row_map.delete(np.arange(8))
    nbytes = row_map.nbytes()
    for block, rows in enumerate(blocks, start=8):
        row_map.put(np.array(rows), block)
    assert (row_map.rows, row_map.nbytes()) == (len(last), nbytes)


@given(st.lists(st.integers(0, 3), max_size=200), _FIRSTS, st.sampled_from([1, 40, 1 << 34]))
def test_a_block_table_has_what_was_put_and_not_dropped(
    kept_every: list[int], first: int, apart: int
) -> None:
    table, held = BlockTable(), {}
    for order, drop in enumerate(kept_every):
        number = first + order * apart
        table.put(number, engine=order, part=0, version=order % 7, step=order, row_bytes=9)
        held[number] = order % 7
        if drop and held:
            oldest = list(held)[:drop]
            table.delete(np.array(oldest, dtype=np.int64))
            held = {key: value for key, value in held.items() if key not in oldest}
    numbers, blocks = table.held()
    assert dict(zip(numbers.tolist(), blocks["version"].tolist(), strict=True)) == held
    asked = np.array([*held, -1], dtype=np.int64)
    assert table.versions(asked).tolist() == [*held.values(), -1]
    assert table.nbytes() <= 25 * max(1024, 2 * len(kept_every))


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_groups_walk_every_index_once_under_its_key(keys: list[int]) -> None:
    indices = np.arange(len(keys))
    found = [(key, indices[at]) for key, at in group_indices(np.array(keys, dtype=int))]
    assert [key for key, _ in found] == sorted(set(keys))
    walked = [(key, index) for key, at in found for index in at.tolist()]
    assert sorted(walked, key=lambda item: item[1]) == [(k, i) for i, k in enumerate(keys)]


@given(st.lists(st.booleans(), max_size=30))
def test_stretches_cover_every_index_once_and_begin_where_they_are_told(begins: list[bool]) -> None:
    firsts, lengths = runs(np.array(begins, dtype=np.bool_))
    assert firsts.tolist() == [at for at, begin in enumerate(begins) if begin or at == 0]
    assert np.repeat(firsts, lengths).tolist() == [
        max(first for first in firsts.tolist() if first <= at) for at in range(len(begins))
    ]


@given(st.sets(st.integers(0, 20_000)), st.integers(0, 20_000))
def test_a_sequence_set_is_a_set(numbers: set[int], asked: int) -> None:
    accepted = SequenceSet()
    for number in numbers:
        accepted.add(number)
        accepted.add(number)
    assert (asked in accepted) == (asked in numbers)
    assert all(number in accepted for number in numbers)


_FAR = st.lists(st.integers(0, 5000) | st.integers(0, 1 << 62), min_size=1, max_size=80)


@given(st.lists(_FAR, min_size=1, max_size=6))
def test_rows_never_take_more_than_was_said_before(blocks: list[list[int]]) -> None:
    row_map = RowMap()
    for block, rows in enumerate(blocks):
        before, said = row_map.nbytes(), row_map.growth(np.array(rows))
        row_map.put(np.array(rows), block)
        assert row_map.nbytes() <= before + said
