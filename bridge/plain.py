"""Safe display of texts from untrusted peers, such as engine names."""

from __future__ import annotations


def plain(text: str) -> str:
    r"""Return a text without terminal controls and without characters that hide or reorder text.

    Control characters, line ends, bidirectional marks and other characters without a glyph become
    Python escapes: "\x1b", "\u202e".
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
