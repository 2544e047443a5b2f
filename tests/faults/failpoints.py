"""Failpoints: the k-th call with which a process changes the files below a folder goes wrong.

`failpoints.c` counts the calls, in processes that were started with it loaded and have attached.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from errno import EIO, ENOSPC, EROFS
from pathlib import Path
from unittest.mock import patch

_SOURCE = Path(__file__).with_name("failpoints.c")
_FIELDS = struct.Struct("=6q")  # at, action, error, lasting, count, met
_MOST_STEPS, _NAME_BYTES = 4096, 48
_NOWHERE = -1


class Action(IntEnum):
    """What the chosen call meets; ``enum action`` of failpoints.c."""

    KILL = 1
    KILL_WITHIN = 2
    FAIL = 3
    SHORT = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call goes wrong: once, or from then on (``lasting``)."""

    action: Action
    error: int = 0
    lasting: bool = False


# Two ways each: a repetition takes one of them.
FAILURES: dict[str, tuple[Failure, Failure]] = {
    "kill -9": (Failure(Action.KILL), Failure(Action.KILL_WITHIN)),
    "ENOSPC": (
        Failure(Action.FAIL, ENOSPC, lasting=True),
        Failure(Action.SHORT, ENOSPC, lasting=True),
    ),
    "EIO": (Failure(Action.FAIL, EIO), Failure(Action.FAIL, EIO, lasting=True)),
    "EROFS": (Failure(Action.FAIL, EROFS, lasting=True), Failure(Action.FAIL, EROFS)),
}


class Plan:
    """What goes wrong and what was called, shared with the processes that attach to its file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("w+b") as opened:
            opened.truncate(_FIELDS.size + _MOST_STEPS * _NAME_BYTES)
            self._map = mmap.mmap(opened.fileno(), 0)
        self.clear()

    def clear(self) -> None:
        """Count from 0 again; nothing goes wrong from now on."""
        _FIELDS.pack_into(self._map, 0, _NOWHERE, 0, 0, 0, 0, 0)

    def arm(self, at: int, failure: Failure) -> None:
        """Count from 0 again; call ``at`` meets the failure."""
        told = (at, failure.action, failure.error, failure.lasting, 0, 0)
        _FIELDS.pack_into(self._map, 0, *told)

    def disarm(self) -> None:
        """Let nothing go wrong from now on, and keep the counts."""
        struct.pack_into("=q", self._map, 0, _NOWHERE)

    @property
    def met(self) -> int:
        """Calls that went wrong."""
        return int(_FIELDS.unpack_from(self._map)[5])

    @property
    def steps(self) -> list[str]:
        """The calls since the count began: function and file."""
        count = min(int(_FIELDS.unpack_from(self._map)[4]), _MOST_STEPS)
        names = [self._name(number) for number in range(count)]
        return [name.rstrip(b"\0").decode() for name in names]

    def _name(self, number: int) -> bytes:
        start = _FIELDS.size + number * _NAME_BYTES
        return self._map[start : start + _NAME_BYTES].partition(b"\0")[0]


def attach(plan: Path, folder: Path) -> None:
    """Have this process's calls on files below ``folder`` counted from now on."""
    error = ctypes.CDLL(None).failpoints_attach(os.fsencode(plan), os.fsencode(folder))
    if error:
        raise OSError(error, f"cannot attach to {plan}")


@contextmanager
def loaded(folder: Path) -> Iterator[None]:
    """Have processes that are started meanwhile load the library, built into ``folder``."""
    library = folder / "failpoints.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    with patch.dict(os.environ, LD_PRELOAD=str(library)):
        yield


def cannot_compile() -> str:
    """Say why there are no failpoints here, empty if there are."""
    return "" if shutil.which("gcc") else "needs gcc to build failpoints.c"
