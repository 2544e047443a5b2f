"""Attributes of the upstream's objects that our code reads or sets: are they still there?"""

import difflib
import dis
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType
from typing import Any

from patches.check.contract import Use, resolve


@dataclass(frozen=True)
class Attributes(Use):
    """We read or set these attributes of a class's instances, or of a module."""

    owner: str
    names: tuple[str, ...]

    def fault(self) -> str:
        """Whether the class declares them or sets them in a method."""
        owner = resolve(self.owner)
        absent = [name for name in self.names if not _has(owner, name)]
        if not absent:
            return ""
        close = difflib.get_close_matches(absent[0], set(_names(owner)))
        similar = f" but {', '.join(close)}" if close else ""
        return f"we use {', '.join(absent)} of {self.owner}, which has no such attribute{similar}"


def _has(owner: Any, name: str) -> bool:
    """Whether a module has a name, or a class declares it or sets it in a method."""
    classes = owner.__mro__ if isinstance(owner, type) else (owner,)
    return any(
        name in vars(each)
        or name in vars(each).get("__annotations__", {})
        or any(_sets(code, name) for code in _codes(each))
        for each in classes
    )


def _sets(code: CodeType, name: str) -> bool:
    """Whether a method sets the attribute of its first argument, not of something else."""
    if name not in code.co_names or not code.co_argcount:
        return False
    return any(
        store.opname == "STORE_ATTR" and store.argval == name and load.argval == code.co_varnames[0]
        for load, store in pairwise(dis.get_instructions(code))
    )


def _codes(owner: Any) -> Iterator[CodeType]:
    """The code of every method of a class; nothing for a module, whose globals are its names."""
    if not isinstance(owner, type):
        return
    for value in vars(owner).values():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        code = getattr(inspect.unwrap(function), "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _names(owner: Any) -> Iterator[str]:
    """What a misspelt attribute may have meant."""
    for each in owner.__mro__ if isinstance(owner, type) else (owner,):
        yield from (*vars(each), *vars(each).get("__annotations__", {}))
        for code in _codes(each):
            yield from code.co_names
