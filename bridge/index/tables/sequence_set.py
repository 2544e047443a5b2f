"""Which sequence numbers of an engine have been accepted: one bit each."""

from __future__ import annotations

from typing import Self

import numpy as np

from bridge.index.tables.saved import Saved, Snapshot, integers

_PAGE_BITS = 12
_PAGE_BYTES = (1 << _PAGE_BITS) // 8


class SequenceSet:
    """A set of non-negative integers that are mostly consecutive."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: numbers of pages, and the bits of each."""
        bits = b"".join(page.to_bytes(_PAGE_BYTES, "little") for page in self._pages.values())
        pages = np.frombuffer(bits, np.uint8).reshape(-1, _PAGE_BYTES)
        return {"numbers": integers(self._pages), "pages": pages}

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Make again what gave a snapshot."""
        made = cls()
        pages = saved.array("pages", np.uint8, _PAGE_BYTES)
        for number, page in zip(saved.integers("numbers"), pages, strict=True):
            made._pages[number] = int.from_bytes(page.tobytes(), "little")
        return made

    def __contains__(self, seq: int) -> bool:
        page = self._pages.get(seq >> _PAGE_BITS, 0)
        return bool(page >> (seq & ((1 << _PAGE_BITS) - 1)) & 1)

    def add(self, seq: int) -> None:
        """Add a number; adding it again changes nothing."""
        bit = 1 << (seq & ((1 << _PAGE_BITS) - 1))
        self._pages[seq >> _PAGE_BITS] = self._pages.get(seq >> _PAGE_BITS, 0) | bit

    def nbytes(self) -> int:
        """Return the memory that the set takes, about."""
        return len(self._pages) * ((1 << _PAGE_BITS) // 7 + 128)
