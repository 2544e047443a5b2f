"""The columns of a narrowed row within a row of the layout it was narrowed from.

Shape legend: B bytes of a narrowed row.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bridge.formats import scale_bytes
from bridge.layout.record import Field, RecordLayout
from bridge.layout.site import Kind, Part


@lru_cache(maxsize=256)
def byte_columns(full: RecordLayout, narrowed: RecordLayout, part: Part) -> NDArray[np.int64]:
    """Return, for every byte of a narrowed row, its column in a full row: int64 [B], ascending.

    Callers must not change the array.
    """
    full_fields = {(f.site, f.layer, f.slot, f.kind): f for f in full.fields(part)}
    parts = [
        _columns(
            full, full_fields[field.site, field.layer, field.slot, field.kind], narrowed, field
        )
        for field in narrowed.fields(part)
    ]
    columns_B = np.concatenate([np.empty(0, np.int64), *parts])
    columns_B.flags.writeable = False
    return columns_B


@lru_cache(maxsize=256)
def selection(full: RecordLayout, narrowed: RecordLayout, part: Part) -> tuple[slice, ...]:
    """Return the column slices of a full row whose bytes, in order, are a narrowed row."""
    return as_slices(byte_columns(full, narrowed, part))


@lru_cache(maxsize=256)
def overlap(
    full: RecordLayout, source: RecordLayout, target: RecordLayout, part: Part
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes that two narrowed rows share, as columns of the one and of the other.

    Callers must not change the arrays.
    """
    _, source_B, target_B = np.intersect1d(
        byte_columns(full, source, part),
        byte_columns(full, target, part),
        assume_unique=True,
        return_indices=True,
    )
    return source_B, target_B


def as_slices(columns_B: NDArray[np.int64]) -> tuple[slice, ...]:
    """Return ascending columns as runs of neighbours."""
    ends = np.flatnonzero(np.diff(columns_B) != 1)
    firsts = columns_B[[0, *(ends + 1)]] if len(columns_B) else columns_B
    lasts = columns_B[[*ends, -1]] if len(columns_B) else columns_B
    return tuple(
        slice(first, last + 1) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    )


def _columns(
    full: RecordLayout, whole: Field, narrowed: RecordLayout, field: Field
) -> NDArray[np.int64]:
    """Return the columns of one narrowed field, ``whole`` being the same field of a full row."""
    if field.kind is Kind.CODES:  # planes, each of all values
        at = _first(full, narrowed, field) // 8
        plane, kept = whole.nbytes // full.bits, field.nbytes // full.bits
        starts = whole.offset + np.arange(full.bits)[:, None] * plane + at
        return (starts + np.arange(kept)).reshape(-1)
    at = 0
    if field.kind is Kind.SCALES:
        at = scale_bytes(_first(full, narrowed, field), full.scale_bits)
    return whole.offset + at + np.arange(field.nbytes)


def _first(full: RecordLayout, narrowed: RecordLayout, field: Field) -> int:
    """Return how many of the full row's values lie before those of a narrowed field."""
    return narrowed.values(field.site).start - full.values(field.site).start
