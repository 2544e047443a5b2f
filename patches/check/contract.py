"""What our code takes for granted in an upstream, checked by name when a process starts.

Patches find the places where the upstream calls us. This is about the rest: what our code calls,
overrides and reads. Each side lists it in its ``preflight/upstream_api.py``, as calls, overrides
and callbacks (``signatures.py``) and attributes (``attributes.py``), under
``module:qualified.name``.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from patches.apply.state import require_upstream
from patches.config import select_target, version_key
from patches.errors import PatchError


class AbsentError(Exception):
    """Something that our code uses is not there; half a sentence."""


@dataclass(frozen=True)
class Use(ABC):
    """One thing that our code takes for granted; from release ``since`` on, until ``before``."""

    since: str = field(default="", kw_only=True)
    before: str = field(default="", kw_only=True)

    def concerns(self, version: str) -> bool:
        """Whether our code does this with that release."""
        ours = version_key(version)
        return version_key(self.since) <= ours and not (
            self.before and version_key(self.before) <= ours
        )

    @abstractmethod
    def fault(self) -> str:
        """Half a sentence: what we expect and what there is; empty if they fit."""


def faults(uses: Iterable[Use], version: str) -> Iterator[str]:
    """What does not fit that release of the upstream, which must be the imported one."""
    for use in uses:
        if use.concerns(version):
            try:
                problem = use.fault()
            except AbsentError as error:
                problem = str(error)
            if problem:
                yield problem


def require_known_upstream(name: str, uses: Iterable[Use]) -> None:
    """Check what our code takes for granted in target ``name``, as this process imports it.

    Raises:
        PatchError: naming the functions and attributes that are different, and the way out.
    """
    target = select_target(name)
    version = require_upstream(target).version
    if found := list(faults(uses, version)):
        raise PatchError(
            f"{target.distribution} {version} is not as our code needs it: {'; '.join(found)}. "
            "Remove plugins that replace these, or install one of "
            f"{', '.join(target.versions())} unchanged, or report this."
        )


def resolve(path: str) -> Any:
    """Import what ``module:qualified.name`` names; without a name the module.

    Raises:
        AbsentError: there is no such thing, or importing it fails.
    """
    module, _, name = path.partition(":")
    try:
        return reduce(getattr, name.split(".") if name else (), importlib.import_module(module))
    except Exception as error:
        raise AbsentError(f"we use {path} ({type(error).__name__}: {error})") from error
