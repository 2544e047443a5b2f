"""Checksums of single rows, kept beside them on disk: one altered row costs only itself.

The entry's number and the row's place in it go into the checksum, so a row that is intact but
stands where another belongs is found as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from bridge.wire.envelope import Buffer

_OFFSET_BITS = 20  # a message has at most 2^20 rows (bridge.wire.ingest.MAX_ROWS)


def row_checksums(number: int, payload: Buffer, row_bytes: int) -> NDArray[np.uint64]:
    """Return the checksums of all rows of entry ``number``: uint64 [n]."""
    rows = memoryview(payload)
    row_bytes = row_bytes or rows.nbytes or 1
    first = number << _OFFSET_BITS
    sums = [
        xxh3_64_intdigest(rows[begin : begin + row_bytes], first + offset)
        for offset, begin in enumerate(range(0, rows.nbytes, row_bytes))
    ]
    return np.array(sums, dtype="<u8")


def row_is_intact(number: int, offset: int, row: Buffer, expected: int) -> bool:
    """Whether a row read from ``offset`` of entry ``number`` is the one that was written there."""
    return bool(xxh3_64_intdigest(row, (number << _OFFSET_BITS) + offset) == expected)
