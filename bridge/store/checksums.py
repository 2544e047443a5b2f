"""Checksums of single rows, stored beside them on disk: one altered row costs only itself.

The checksum also covers the entry's number and the row's index in the entry. It therefore detects
an intact row at the location of another row, too.
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
    """Whether a row at ``offset`` of entry ``number`` has the expected checksum."""
    return bool(xxh3_64_intdigest(row, (number << _OFFSET_BITS) + offset) == expected)
