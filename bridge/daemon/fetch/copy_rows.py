"""Copy rows of many payloads to one buffer.

Shape legend: U = runs of rows, K = columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bridge.wire.envelope import Buffer


def copy_rows_in_python(
    target: memoryview,
    payloads: Sequence[Buffer],
    begins_U: NDArray[np.int64],
    counts_U: NDArray[np.int64],
    row_bytes: int,
    columns_K2: NDArray[np.int64],
) -> int:
    """Copy columns of runs of rows to the start of ``target``; return the number of bytes.

    A run has ``counts`` rows of ``row_bytes`` and starts at byte ``begins`` of its payload.

    Raises:
        ValueError: a run is longer than its payload, a column is outside a row, or the target
            is too small. The content of the target is then undefined.
    """
    columns = columns_K2.tolist()
    if row_bytes <= 0 or any(not 0 <= start <= stop <= row_bytes for start, stop in columns):
        raise ValueError("runs or columns are not those of the payloads' rows")
    is_whole = columns == [[0, row_bytes]]
    at = 0
    for payload, begin, count in zip(payloads, begins_U.tolist(), counts_U.tolist(), strict=True):
        end = begin + count * row_bytes
        if not 0 <= begin <= end <= len(payload):
            raise ValueError("a run of rows ends beyond its payload")
        run = memoryview(payload)[begin:end]
        rows_CR = np.frombuffer(run, np.uint8).reshape(count, row_bytes)
        for part in [run] if is_whole else [_cut(rows_CR, columns)]:
            if at + len(part) > len(target):
                raise ValueError("the rows do not fit the target")
            target[at : at + len(part)] = part
            at += len(part)
    return at


def _cut(rows_CR: NDArray[np.uint8], columns: list[list[int]]) -> memoryview:
    cut_CS = [rows_CR[:, start:stop] for start, stop in columns]
    return np.concatenate([*cut_CS, rows_CR[:, :0]], axis=1).reshape(-1).data


try:
    from bridge.daemon.fetch._rows import (
        copy_rows as copy_rows,  # pip builds it if there is a C compiler
    )
except ImportError:
    copy_rows = copy_rows_in_python
