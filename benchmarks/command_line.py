"""The command that a result was made with, as it goes into the JSON."""

from __future__ import annotations

import sys
from pathlib import PurePath


def command_line(module: str, arguments: list[str] | None = None) -> str:
    """Return the command of this process, with its own arguments unless others are given.

    Of an absolute path only the name stays: where a machine keeps its files says nothing.
    """
    given = sys.argv[1:] if arguments is None else arguments
    shown = [PurePath(word).name if PurePath(word).is_absolute() else word for word in given]
    return " ".join(["python", "-m", module, *shown])
