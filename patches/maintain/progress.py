"""What is on disk about a rebase that is under way."""

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from patches.format.patchfile import Patch


class Outcome(StrEnum):
    """What became of a patch."""

    SAME = "same text"
    MOVED = "other line numbers"
    MERGED = "other context"
    SOLVED = "solved by hand"
    CONFLICT = "conflict"
    DROPPED = "dropped"


@dataclass
class Progress:
    """The series of ``source`` moves to ``version``, of which ``file`` was published.

    ``outcomes`` has the patches that are done, in order, and ``head`` is the commit of the last of
    them. ``stopped`` says that the next one did not merge and is in the hands of the user.
    """

    target: str
    source: str
    version: str
    file: str
    sha256: str
    head: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    stopped: bool = False

    @classmethod
    def load(cls, file: Path) -> "Progress":
        """Read what :meth:`save` wrote; FileNotFoundError if there is none."""
        facts = json.loads(file.read_bytes())
        facts["outcomes"] = {name: Outcome(value) for name, value in facts["outcomes"].items()}
        return cls(**facts)

    def save(self, file: Path) -> None:
        """Write it down."""
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")


def merged(before: Patch, after: Patch) -> Outcome:
    """How a patch that merged differs from what it was."""
    if after.diffs == before.diffs:
        return Outcome.SAME
    return Outcome.MOVED if _texts(after) == _texts(before) else Outcome.MERGED


def _texts(patch: Patch) -> list[tuple[str, list[tuple[bytes, ...]]]]:
    """The lines of every hunk without their numbers."""
    return [(diff.path, [hunk.old + hunk.new for hunk in diff.hunks]) for diff in patch.diffs]
