"""Which sequence numbers of an engine have been accepted: one bit each."""

from __future__ import annotations

_PAGE_BITS = 12


class SequenceSet:
    """A set of non-negative integers that are mostly consecutive."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}

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
