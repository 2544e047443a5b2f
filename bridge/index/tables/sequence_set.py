"""The accepted sequence numbers of an engine, one bit each."""

from __future__ import annotations

from typing import Self

import numpy as np

from bridge.index.tables.saved import Saved, Snapshot, integers

_WORD_BITS = 12
_WORD_BYTES = (1 << _WORD_BITS) // 8


class SequenceSet:
    """A set of non-negative integers that are mostly consecutive."""

    def __init__(self) -> None:
        self._words: dict[int, int] = {}

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: the numbers and the bits of the words."""
        bits = b"".join(word.to_bytes(_WORD_BYTES, "little") for word in self._words.values())
        words = np.frombuffer(bits, np.uint8).reshape(-1, _WORD_BYTES)
        return {"numbers": integers(self._words), "pages": words}

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Return the set of a snapshot."""
        made = cls()
        words = saved.array("pages", np.uint8, _WORD_BYTES)
        for number, word in zip(saved.integers("numbers"), words, strict=True):
            made._words[number] = int.from_bytes(word.tobytes(), "little")
        return made

    def __contains__(self, seq: int) -> bool:
        word = self._words.get(seq >> _WORD_BITS, 0)
        return bool(word >> (seq & ((1 << _WORD_BITS) - 1)) & 1)

    def add(self, seq: int) -> None:
        """Add a number; adding it again changes nothing."""
        bit = 1 << (seq & ((1 << _WORD_BITS) - 1))
        self._words[seq >> _WORD_BITS] = self._words.get(seq >> _WORD_BITS, 0) | bit

    def nbytes(self) -> int:
        """Return the approximate bytes of the set."""
        return len(self._words) * ((1 << _WORD_BITS) // 7 + 128)
