"""Unified diffs as git writes them: a strict parser, and application at the exact lines.

Everything is bytes and a line ends at ``\\n`` only, so that carriage returns, form feeds and
undecodable text pass through unchanged. There is no fuzz and no offset: a series belongs to one
release of the upstream, whose every line number is known.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from patches.errors import PatchError

_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_FILE = re.compile(rb"diff --git a/(\S+) b/(\S+)\n")
_BLOBS = re.compile(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)( 100644)?\n")
_NEW_FILE = b"new file mode 100644\n"
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*\n")
_NO_NEWLINE = b"\\ No newline at end of file"


def split_lines(data: bytes) -> list[bytes]:
    """Split after every line feed and nowhere else; the pieces join to ``data``."""
    return _LINES.findall(data)


@dataclass(frozen=True)
class Hunk:
    """One change: the lines ``old`` at index ``start`` become ``new``, context included.

    ``start`` counts from 0 in the file before the patch, ``new_start`` in the file after it.
    """

    start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """The hunks for one file. ``path`` is relative to site-packages, with ``/`` between parts.

    ``blobs`` are git's object names of the file before and after, as the ``index`` line has them.
    """

    path: str
    creates: bool
    blobs: tuple[str, str]
    hunks: tuple[Hunk, ...]

    def apply(self, before: bytes | None) -> bytes:
        """Return the content after the patch.

        ``before`` is None where there is no such file. PatchError unless every hunk finds exactly
        its own lines at exactly its own place.
        """
        if self.creates != (before is None):
            found = "does not exist" if before is None else "exists already"
            raise PatchError(f"{self.path} {found}, which its patch does not expect.")
        before_lines = split_lines(before or b"")
        after: list[bytes] = []
        position = 0
        for hunk in self.hunks:
            end = hunk.start + len(hunk.old)
            after += before_lines[position : hunk.start]
            in_place = position <= hunk.start and len(after) == hunk.new_start
            if not in_place or tuple(before_lines[hunk.start : end]) != hunk.old:
                raise PatchError(
                    f"the hunk at line {hunk.start + 1} of {self.path} does not match the file: "
                    "make the patch anew against the series before it."
                )
            after += hunk.new
            position = end
        return b"".join(after + before_lines[position:])


def parse_diff(text: bytes) -> tuple[FileDiff, ...]:
    """Parse the diff part of a patch file; PatchError names the first line that is not understood.

    Edits and new files are understood; deletions, renames, mode changes and binary hunks are not.
    """
    reader = _Reader(split_lines(text))
    diffs = tuple(_files(reader))
    paths = [diff.path for diff in diffs]
    if not diffs or len(set(paths)) != len(paths):
        raise PatchError("a patch needs a diff for at least one file and at most one diff a file.")
    return diffs


class _Reader:
    """A cursor over lines that fails by line number."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.at = 0

    def peek(self) -> bytes:
        return self.lines[self.at] if self.at < len(self.lines) else b""

    def next(self) -> bytes:
        line = self.peek()
        self.at += 1
        return line

    def match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes]:
        found = pattern.fullmatch(self.peek())
        if found is None:
            raise self.unexpected()
        self.at += 1
        return found

    def expect(self, line: bytes) -> None:
        if self.peek() != line:
            raise self.unexpected()
        self.at += 1

    def unexpected(self) -> PatchError:
        return PatchError(
            f"line {self.at + 1} of the diff, {self.peek()[:60]!r}, is not what a plain git diff "
            "has there: export the patch again."
        )


def _files(reader: _Reader) -> Iterator[FileDiff]:
    while reader.peek():
        old_path, new_path = reader.match(_FILE).groups()
        if old_path != new_path:
            raise PatchError(f"{old_path!r} is renamed: a patch may only edit files or add them.")
        creates = reader.peek() == _NEW_FILE
        if creates:
            reader.next()
        blobs = reader.match(_BLOBS)
        reader.expect(b"--- /dev/null\n" if creates else b"--- a/" + old_path + b"\n")
        reader.expect(b"+++ b/" + old_path + b"\n")
        hunks = [_hunk(reader)]
        while reader.peek().startswith(b"@@"):
            hunks.append(_hunk(reader))
        names = (blobs[1].decode(), blobs[2].decode())
        yield FileDiff(_checked(old_path), creates, names, tuple(hunks))


def _checked(path: bytes) -> str:
    text = path.decode("ascii", "replace")
    pure = PurePosixPath(text)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != text or "\ufffd" in text:
        raise PatchError(f"{text!r} is not a plain path relative to site-packages.")
    return text


def _hunk(reader: _Reader) -> Hunk:
    fields = reader.match(_HUNK).groups()
    old_line, old_count, new_line, new_count = (int(f) if f is not None else 1 for f in fields)
    old: list[bytes] = []
    new: list[bytes] = []
    added: list[bytes] = []
    removed: list[bytes] = []
    sides = {b" ": (old, new), b"-": (old, removed), b"+": (new, added)}
    while len(old) < old_count or len(new) < new_count:
        kind = reader.peek()[:1]
        if kind not in sides:
            raise reader.unexpected()
        content = reader.next()[1:]
        if reader.peek().rstrip(b"\n") == _NO_NEWLINE:
            reader.next()
            content = content.removesuffix(b"\n")
        for side in sides[kind]:
            side.append(content)
    if len(old) != old_count or len(new) != new_count:
        raise reader.unexpected()
    # An empty side is written as the line before it (so 0 at the top of a file).
    start, new_start = old_line - (old_count > 0), new_line - (new_count > 0)
    return Hunk(start, new_start, tuple(old), tuple(new), tuple(added), tuple(removed))
