"""What a maintainer needs to solve a conflict: the place, both sides, the hook that it carries."""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from patches.format.diff import Hunk
from patches.format.patchfile import Patch
from patches.maintain.git import attempt, file_at, git_lines

HOOK_CALL = re.compile(r"\b\w*hooks\.([A-Za-z]\w*)")
_DEFINITION = re.compile(r"( *)(?:async +)?(?:def|class) +(\w+)")
_MAX_PLACES = 12
_START, _BASE, _MIDDLE, _END = "<<<<<<< ", "||||||| ", "=======", ">>>>>>> "


@dataclass(frozen=True)
class Sides:
    """The three texts of a conflict that begins at ``line`` (from 1) of the half-done file.

    ``release`` are the lines of the new release, ``base`` those that the patch was made for and
    ``patch`` those that it makes of them.
    """

    line: int
    release: tuple[str, ...]
    base: tuple[str, ...]
    patch: tuple[str, ...]


@dataclass(frozen=True)
class Conflict:
    """One place that git could not merge.

    ``deleted`` says that the new release has no such file. ``hooks`` are called in this very
    place. ``function`` is the definition around
    the hunk in the old release, empty at module level; ``defined_at`` are the places,
    ``path:line``, where the new release defines that name, and ``used_at`` those where the old
    release uses it: if it is gone, the new release has its code there.
    """

    path: str
    deleted: bool
    sides: Sides
    hooks: tuple[str, ...]
    function: str
    defined_at: tuple[str, ...]
    used_at: tuple[str, ...]


def find_conflicts(tree: Path, patch: Patch, parent: str) -> list[Conflict]:
    """Describe every conflict that the cherry-pick of ``patch`` has left in ``tree``.

    ``parent`` is the commit of the old release that the patch was made on.
    """
    found: list[Conflict] = []
    for path in git_lines(tree, "diff", "--name-only", "--diff-filter=U"):
        hunks = [hunk for diff in patch.diffs if diff.path == path for hunk in diff.hunks]
        old = _text(file_at(tree, parent, path) or b"")
        deleted = file_at(tree, "HEAD", path) is None
        if deleted:
            places = [_sides_of(hunk) for hunk in hunks]
        else:
            places = list(_marked(_text((tree / path).read_bytes())))
        # Git can also disagree about the file as a whole; then there is no place to show.
        for sides in places or [Sides(1, (), (), ())]:
            function = _enclosing(old, _hunk_at(sides, hunks))
            hooks = tuple(dict.fromkeys(HOOK_CALL.findall("\n".join(sides.patch))))
            defined = _definitions(tree, "HEAD", path, function)
            used = () if defined else _uses(tree, parent, path, function)
            found.append(Conflict(path, deleted, sides, hooks, function, defined, used))
    return found


def has_markers(file: Path) -> bool:
    """Whether a file still has a conflict of git in it."""
    return any(line.startswith((_START, _BASE, _END)) for line in _text(file.read_bytes()))


def as_json(patch: Patch, conflicts: list[Conflict]) -> str:
    """The conflicts of one patch for programs."""
    found = [asdict(conflict) for conflict in conflicts]
    facts = {"patch": patch.name, "hooks": patch.hooks, "conflicts": found}
    return json.dumps(facts, indent=2) + "\n"


def as_markdown(patch: Patch, conflicts: list[Conflict], tree: Path, then: str) -> str:
    """The conflicts of one patch for people; ``then`` is the command that goes on."""
    parts = [
        f"# {patch.name}",
        f"{patch.subject}. Why it is needed: {patch.trailers['Reason']}. "
        f"Its hooks: {', '.join(patch.hooks) or 'none'}.",
        f"Solve this in `{tree}`, keep every call of a hook, then run `{then}`.",
    ]
    for conflict in conflicts:
        parts += _section(conflict)
    return "\n\n".join(parts) + "\n"


def _section(conflict: Conflict) -> Iterator[str]:
    sides = conflict.sides
    yield f"## {conflict.path}, line {sides.line}"
    place = f"`{conflict.function}`" if conflict.function else "module level"
    yield f"Hook here: {', '.join(conflict.hooks) or 'none'}. In the old release: {place}."
    if conflict.defined_at:
        yield "\n".join(("The new release defines it at:", "", *_items(conflict.defined_at)))
    if conflict.used_at:
        yield "\n".join(
            ("The new release does not. The old one uses it at:", "", *_items(conflict.used_at))
        )
    if conflict.deleted:
        yield "The new release has no such file: `git rm` it, put the call where its code is now."
    elif sides.release:
        yield _block("New release:", "python", sides.release)
    else:
        yield "The new release has nothing in this place."
    change = difflib.unified_diff(sides.base, sides.patch, "old", "patched", lineterm="")
    yield _block("What the patch does:", "diff", tuple(change))


def _items(places: tuple[str, ...]) -> list[str]:
    return [f"- `{place}`" for place in places]


def _block(title: str, language: str, lines: tuple[str, ...]) -> str:
    return "\n".join((title, "", f"```{language}", *lines, "```"))


def _text(content: bytes) -> list[str]:
    lines = content.decode("utf-8", "replace").split("\n")
    return lines if lines[-1] else lines[:-1]


def _marked(lines: list[str]) -> Iterator[Sides]:
    """The conflicts of a file in git's diff3 style."""
    parts: list[list[str]] | None = None
    start = 0
    for number, line in enumerate(lines, 1):
        if line.startswith(_START):
            parts, start = [[]], number
        elif parts and (line.startswith(_BASE) or (len(parts) == 2 and line == _MIDDLE)):
            parts.append([])
        elif parts and line.startswith(_END):
            release, base, patch = (tuple(part) for part in parts)
            yield Sides(start, release, base, patch)
            parts = None
        elif parts:
            parts[-1].append(line)


def _sides_of(hunk: Hunk) -> Sides:
    """A hunk for a file that is gone: there is no side of the release."""
    base, patch = (tuple(_text(b"".join(side))) for side in (hunk.old, hunk.new))
    return Sides(hunk.new_start + 1, (), base, patch)


def _hunk_at(sides: Sides, hunks: list[Hunk]) -> Hunk | None:
    """The hunk that has the most lines of the conflict."""
    lines = {line.encode() + b"\n" for line in (*sides.base, *sides.patch) if line.strip()}
    return max(hunks, key=lambda hunk: len(lines & {*hunk.old, *hunk.new}), default=None)


def _enclosing(lines: list[str], hunk: Hunk | None) -> str:
    """Name of the definition that the first changed line of ``hunk`` lies in."""
    if hunk is None:
        return ""
    pairs = zip(hunk.old, hunk.new, strict=False)
    kept = next((at for at, (old, new) in enumerate(pairs) if old != new), len(hunk.old))
    changed = _text((hunk.new + hunk.old)[kept])[0]
    for line in reversed(lines[: hunk.start + kept]):
        definition = _DEFINITION.match(line)
        if definition and len(definition[1]) < _indent(changed):
            return definition[2]
        if line.strip() and _indent(line) == 0 and not line.startswith(")"):
            break
    return ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _definitions(tree: Path, commit: str, path: str, name: str) -> tuple[str, ...]:
    """Where ``name`` is defined: in the file itself or, if not there, in the others."""
    if not name:
        return ()
    pattern = rf"^ *(async +)?(def|class) +{name}\b"
    here = _grep(tree, pattern, commit, "--", path)
    return here or _grep(tree, pattern, commit)[:_MAX_PLACES]


def _uses(tree: Path, commit: str, path: str, name: str) -> tuple[str, ...]:
    definitions = _definitions(tree, commit, path, name)
    found = _grep(tree, rf"\b{name}\(", commit) if name else ()
    return tuple(place for place in found if place not in definitions)[:_MAX_PLACES]


def _grep(tree: Path, pattern: str, *where: str) -> tuple[str, ...]:
    """The places, ``path:line``, that match an extended regular expression in a commit."""
    # git grep exits with 1 where nothing is found.
    found = attempt(tree, "grep", "--line-number", "--extended-regexp", pattern, *where)
    lines = (line.split(":", 3) for line in _text(found.stdout) if line)
    return tuple(f"{path}:{number}" for _commit, path, number, _code in lines)
