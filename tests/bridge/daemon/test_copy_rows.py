"""Rows are copied out of payloads in order, in C as in Python, and never from or to elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.daemon.fetch import copy_rows
from bridge.daemon.fetch.copy_rows import copy_rows_in_python

_ROW = 12
_ROWS = 6  # of a payload
_PAYLOADS = [memoryview(np.random.default_rng(number).bytes(_ROWS * _ROW)) for number in range(4)]
_IN_C = pytest.param(
    copy_rows.copy_rows,
    id="C",
    marks=pytest.mark.skipif(
        copy_rows.copy_rows is copy_rows_in_python, reason="pip found no C compiler at set-up"
    ),
)
IMPLEMENTATIONS = pytest.mark.parametrize(
    "copy_rows", [pytest.param(copy_rows_in_python, id="Python"), _IN_C]
)
_RUNS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, _ROWS), st.integers(0, _ROWS)).map(
        lambda run: (run[0], run[1], min(run[2], _ROWS - run[1]))
    ),
    max_size=8,
)
_COLUMNS = st.lists(
    st.tuples(st.integers(0, _ROW), st.integers(0, _ROW)).map(lambda ends: tuple(sorted(ends))),
    max_size=4,
)
CopyRows = Callable[..., int]


def _int64(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _copy(
    copy_rows: CopyRows,
    runs: list[tuple[int, int, int]],
    columns: list[tuple[int, ...]],
    room: int,
) -> bytes:
    target = bytearray(room)
    copied = copy_rows(
        memoryview(target),
        [_PAYLOADS[payload] for payload, _, _ in runs],
        _int64([first * _ROW for _, first, _ in runs]),
        _int64([count for _, _, count in runs]),
        _ROW,
        _int64([list(column) for column in columns]).reshape(-1, 2),
    )
    assert not any(target[copied:]), "bytes behind the rows are left alone"
    return bytes(target[:copied])


def _expected(runs: list[tuple[int, int, int]], columns: list[tuple[int, ...]]) -> bytes:
    return b"".join(
        bytes(_PAYLOADS[payload][row * _ROW + start : row * _ROW + stop])
        for payload, first, count in runs
        for row in range(first, first + count)
        for start, stop in columns
    )


@IMPLEMENTATIONS
@given(runs=_RUNS, columns=_COLUMNS, more=st.integers(0, 3))
def test_rows_stand_one_behind_the_other(
    copy_rows: CopyRows,
    runs: list[tuple[int, int, int]],
    columns: list[tuple[int, ...]],
    more: int,
) -> None:
    expected = _expected(runs, columns)
    assert _copy(copy_rows, runs, columns, len(expected) + more) == expected


@IMPLEMENTATIONS
@given(runs=_RUNS, columns=_COLUMNS)
def test_a_target_that_is_one_byte_too_small_is_refused(
    copy_rows: CopyRows, runs: list[tuple[int, int, int]], columns: list[tuple[int, ...]]
) -> None:
    expected = _expected(runs, columns)
    if expected:
        with pytest.raises(ValueError, match="do not fit the target"):
            _copy(copy_rows, runs, columns, len(expected) - 1)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("first", "count"), [(0, _ROWS + 1), (_ROWS, 1), (_ROWS + 1, 0), (-1, 1)])
def test_a_run_beyond_its_payload_is_refused(copy_rows: CopyRows, first: int, count: int) -> None:
    with pytest.raises(ValueError, match="ends beyond its payload"):
        _copy(copy_rows, [(0, first, count)], [(0, _ROW)], 1000)


@IMPLEMENTATIONS
@pytest.mark.parametrize("column", [(-1, 3), (5, 4), (0, _ROW + 1)])
def test_a_column_beyond_the_row_is_refused(copy_rows: CopyRows, column: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not those of the payloads' rows"):
        _copy(copy_rows, [(0, 0, 1)], [column], 1000)


@IMPLEMENTATIONS
@pytest.mark.parametrize("count", [1 << 40, (1 << 63) - 1])
def test_a_run_of_absurdly_many_rows_is_refused(copy_rows: CopyRows, count: int) -> None:
    with pytest.raises(ValueError, match="ends beyond its payload"):
        _copy(copy_rows, [(0, 0, count)], [(0, _ROW)], 1000)
