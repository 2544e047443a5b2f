"""Texts of strangers, such as names of engines, as a person may see them."""

from __future__ import annotations


def plain(text: str) -> str:
    r"""Return a text without what a terminal obeys or what hides or reorders other text.

    Control characters, line ends, bidirectional marks and other characters that have no shape are
    written as Python writes them: "\x1b", "\u202e".
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
