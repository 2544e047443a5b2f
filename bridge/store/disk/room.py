"""Division of a store's limit among classes of writes.

LMDB writes new pages before it can use old ones again, so a deletion needs room. Each class of
writes therefore leaves room for the next one: rows for reserved entries (an engine's registration),
these for entries that free space (an RL step), and these for deletions, which always succeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

_MIN_LIMIT = 1 << 20
_SHARES = 32
_MAX_RESERVE_FILE = 1 << 20
# Two deletions: a path in every table, twice, because the first one's pages are not free yet.
_MIN_FOR_DELETIONS = 48 * 4096


@dataclass(frozen=True, slots=True)
class Room:
    """Byte limits; together the files take at most ``limit``.

    rows, reserved, steps   maximum of live pages after a write of this class
    row_file                maximum size of data.mdb for rows
    file                    maximum size of data.mdb for all other writes
    checkpoint              one checkpoint of the index; two exist while one replaces the other
    reserve_file            a file that the store deletes when the disk is full
    """

    limit: int
    rows: int
    reserved: int
    steps: int
    row_file: int
    file: int
    checkpoint: int
    reserve_file: int

    @classmethod
    def of(cls, limit_bytes: int) -> Self:
        """Divide a limit; a limit below 1 MiB counts as 1 MiB."""
        limit = max(limit_bytes, _MIN_LIMIT)
        share = limit // _SHARES
        file = limit - 2 * share
        steps = file - max(2 * share, _MIN_FOR_DELETIONS)
        reserved = steps - share
        rows = reserved - share
        return cls(
            limit=limit,
            rows=rows,
            reserved=reserved,
            steps=steps,
            row_file=rows + 2 * share,
            file=file,
            checkpoint=share // 2,
            reserve_file=min(share, _MAX_RESERVE_FILE),
        )
