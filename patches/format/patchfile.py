"""One patch file in ``git format-patch`` form: subject, trailers, diff."""

import re
from dataclasses import dataclass

from patches.errors import PatchError
from patches.format.diff import FileDiff, parse_diff

TRAILERS = ("Reason", "Forwarded", "Remove-when", "Group", "Hooks")
GROUPS = ("hooks", "cpu")

_FROM_LINE = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"
_SUBJECT = re.compile(r"^Subject: \[PATCH\] (.+(?:\n .+)*)$", re.MULTILINE)
_TRAILER = re.compile(r"^([A-Z][A-Za-z-]*): *(.*)$")


@dataclass(frozen=True)
class Patch:
    """A parsed patch. ``trailers`` has every name of TRAILERS; ``hooks`` names our functions."""

    name: str
    subject: str
    trailers: dict[str, str]
    diffs: tuple[FileDiff, ...]

    @property
    def group(self) -> str:
        """``hooks`` (the call sites) or ``cpu`` (needed only where there is no GPU)."""
        return self.trailers["Group"]

    @property
    def hooks(self) -> tuple[str, ...]:
        """Functions of our ``hooks.py`` that the added lines call."""
        named = self.trailers["Hooks"]
        return () if named == "none" else tuple(name.strip() for name in named.split(","))

    @property
    def edited_lines(self) -> int:
        """Added plus removed lines; context is not counted."""
        return sum(len(h.added) + len(h.removed) for diff in self.diffs for h in diff.hunks)


def parse_patch(name: str, content: bytes) -> Patch:
    """Parse the file called ``name``; PatchError says what is wrong with it."""
    try:
        return _parse(name, content)
    except PatchError as error:
        raise PatchError(f"{name}: {error}") from None


def _parse(name: str, content: bytes) -> Patch:
    message, mark, diff = content.partition(b"\ndiff --git ")
    try:
        text = message.decode("ascii") + "\n"
    except UnicodeDecodeError:
        raise PatchError("the text before the diff must be ASCII.") from None
    if not text.startswith(_FROM_LINE):
        raise PatchError("the first line is not that of `git format-patch --zero-commit`.")
    header, _, body = text.partition("\n\n")
    subject = _SUBJECT.search(header)
    if subject is None:
        raise PatchError("there is no `Subject: [PATCH] ...` line.")
    trailers = _trailers(body.partition("\n---\n")[0])
    return Patch(name, subject[1].replace("\n ", " "), trailers, parse_diff(mark[1:] + diff))


def _trailers(body: str) -> dict[str, str]:
    paragraph = body.strip("\n").rpartition("\n\n")[2]
    found: dict[str, str] = {}
    for line in paragraph.replace("\n ", " ").splitlines():
        trailer = _TRAILER.match(line)
        if trailer is None or trailer[1] not in TRAILERS or trailer[1] in found:
            raise PatchError(f"{line!r} is not one of the trailers, once: {', '.join(TRAILERS)}.")
        found[trailer[1]] = trailer[2].strip()
    missing = [name for name in TRAILERS if not found.get(name)]
    if missing:
        raise PatchError(f"the last paragraph of the message lacks {', '.join(missing)}.")
    if found["Group"] not in GROUPS:
        raise PatchError(f"Group is {found['Group']!r} and must be one of: {', '.join(GROUPS)}.")
    return found
