"""Read the planned rows from a pool, many entries per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bridge.store.base import ReadPlan, StoredPayload
from bridge.store.mooncake.pool import Pool, Span

_REQUEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Note:
    """The journal's note of a payload: its key, bytes and row checksums."""

    key: str
    nbytes: int
    checksums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of an entry that one request reads."""

    number: int
    first_row: int
    span: Span
    checksums: NDArray[np.uint64]

    @property
    def nbytes(self) -> int:
        return self.span.end - self.span.begin


class PoolReader:
    """Reads entries from a pool, together with the next planned entries."""

    def __init__(self, pool: Pool, note: Callable[[int], Note | None], plan: ReadPlan) -> None:
        self._pool = pool
        self._note = note
        self._plan = plan
        self._rows: dict[int, tuple[int, int]] | None = None
        self._held: dict[int, StoredPayload | None] = {}

    def __call__(self, number: int) -> StoredPayload | None:
        """Return the planned rows of an entry, None if the pool has lost it.

        Raises:
            PoolUnreachable: the pool may still have the entry.
        """
        if number not in self._held:
            if self._rows is None:
                self._rows = _rows(self._plan)
            self._held = self._load(self._next_parts(number, self._rows))
        return self._held.get(number)

    def _next_parts(self, number: int, rows: dict[int, tuple[int, int]]) -> list[_Part]:
        """Return the requested part and the next planned parts, up to the size of a request."""
        wanted = list(rows)
        behind = wanted[wanted.index(number) + 1 :] if number in rows else []
        parts: list[_Part] = []
        nbytes = 0
        for each in [number, *behind]:
            part = self._part(each, rows.get(each))
            if part is None:
                continue
            nbytes += part.nbytes
            if parts and nbytes > _REQUEST_BYTES:
                break
            parts.append(part)
        return parts

    def _part(self, number: int, rows: tuple[int, int] | None) -> _Part | None:
        note = self._note(number)
        if note is None:
            return None
        if rows is None:
            return _Part(number, 0, Span(note.key, 0, note.nbytes), note.checksums)
        first, stop = rows
        row_bytes = self._plan.row_bytes
        span = Span(note.key, first * row_bytes, min(stop * row_bytes, note.nbytes))
        return (
            _Part(number, first, span, note.checksums[first:stop])
            if span.begin < span.end
            else None
        )

    def _load(self, parts: Sequence[_Part]) -> dict[int, StoredPayload | None]:
        ends = np.cumsum([part.nbytes for part in parts]).tolist()
        buffer = np.empty(ends[-1] if ends else 0, dtype=np.uint8)
        present = self._pool.read([part.span for part in parts], buffer) if ends else []
        return {
            part.number: StoredPayload(
                buffer.data[end - part.nbytes : end], part.checksums, part.first_row
            )
            for part, end, there in zip(parts, ends, present, strict=True)
            if there
        }


def _rows(plan: ReadPlan) -> dict[int, tuple[int, int]]:
    """Return (first row, end row) of every entry, in the order of the plan."""
    rows: dict[int, tuple[int, int]] = {}
    for number, first, _, count in plan.runs:
        held = rows.get(number, (first, first + count))
        rows[number] = (min(first, held[0]), max(first + count, held[1]))
    return rows
