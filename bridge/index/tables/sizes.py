"""Memory of the texts in the index."""

from __future__ import annotations

_HEAD_BYTES = 80


def text_bytes(text: str) -> int:
    """Return the maximum bytes of a text.

    CPython stores 1, 2 or 4 bytes per character, and also UTF-8 once a caller has asked for it.
    """
    return _HEAD_BYTES + (1 if text.isascii() else 8) * len(text)
