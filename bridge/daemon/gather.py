"""Read scattered rows out of the store, each checked, into one array.

Shapes: N = rows asked for, R = bytes of a full row, S = bytes of its selected columns.
"""

from __future__ import annotations

import logging
import zlib

import numpy as np
from numpy.typing import NDArray

from bridge.index.grouping import groups
from bridge.layout import Part, RecordLayout
from bridge.store import Reader, Store

log = logging.getLogger(__name__)


class Gather:
    """Reads rows and counts those that are damaged; a damaged row is a missing row."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.corrupt_rows = 0

    def rows(
        self, part: Part, full: RecordLayout, reduced: RecordLayout, places_N: NDArray[np.void]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return (uint8 [N, S], valid bool [N]); rows that are not valid are zero."""
        width = full.row_bytes(part)
        columns = full.selection(part, reduced)
        out_NS = np.zeros((len(places_N), reduced.row_bytes(part)), dtype=np.uint8)
        valid_N = np.zeros(len(places_N), dtype=np.bool_)
        if out_NS.shape[1] == 0:
            return out_NS, valid_N
        offsets_N, crcs_N = places_N["offset"], places_N["crc"]
        with self._store.reader() as read:
            for block, at in groups(places_N["block"]):
                if block < 0:
                    continue
                rows_BR = self._block(read, block, width)
                at = self._intact(rows_BR, at, offsets_N, crcs_N, block)
                _copy_columns(rows_BR, offsets_N[at], columns, out_NS, at)
                valid_N[at] = True
        return out_NS, valid_N

    def _block(self, read: Reader, block: int, width: int) -> NDArray[np.uint8]:
        payload = read(block)
        held = b"" if payload is None else payload
        whole = len(held) // width * width
        return np.frombuffer(held, dtype=np.uint8, count=whole).reshape(-1, width)

    def _intact(
        self,
        rows_BR: NDArray[np.uint8],
        at: NDArray[np.intp],
        offsets_N: NDArray[np.uint32],
        crcs_N: NDArray[np.uint32],
        block: int,
    ) -> NDArray[np.intp]:
        """Return those indices whose rows still have the bytes that the engine sent."""
        if not self._store.may_rot:
            return at
        wanted = zip(offsets_N[at].tolist(), crcs_N[at].tolist(), strict=True)
        good = [
            offset < len(rows_BR) and zlib.crc32(rows_BR[offset].data) == crc
            for offset, crc in wanted
        ]
        if all(good):
            return at
        damaged = good.count(False)
        self.corrupt_rows += damaged
        log.warning("%d rows of entry %d fail their checksum and count as missing", damaged, block)
        intact: NDArray[np.intp] = at[np.array(good)]
        return intact


def _copy_columns(
    rows_BR: NDArray[np.uint8],
    offsets: NDArray[np.uint32],
    columns: tuple[slice, ...],
    out_NS: NDArray[np.uint8],
    at: NDArray[np.intp],
) -> None:
    begin = 0
    for column in columns:
        end = begin + column.stop - column.start
        out_NS[at, begin:end] = rows_BR[offsets, column]
        begin = end
