"""How much memory the index's texts take."""

from __future__ import annotations

_HEAD_BYTES = 80


def text_bytes(text: str) -> int:
    """Return the memory of a text at most.

    CPython stores 1, 2 or 4 bytes a character, and UTF-8 besides once it was asked for.
    """
    return _HEAD_BYTES + (1 if text.isascii() else 8) * len(text)
