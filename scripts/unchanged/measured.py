"""What was measured on one tree, and where two trees differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge.errors import TraceError


class Failed(TraceError):
    """A tree could not be measured."""


@dataclass(frozen=True)
class Measured:
    """Named exact values of one kind: integers, hexadecimal floats, digests, test outcomes.

    `shown` is a summary for people; only `values` is compared.
    """

    name: str
    values: dict[str, str]
    shown: str

    def digest(self) -> str:
        """First twelve digits of the SHA-256 of all names and values."""
        text = json.dumps(self.values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Comparison:
    """The same measurement on both trees; `differences` maps a value's name to both values."""

    part: str
    released: Measured
    patched: Measured
    differences: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether something was measured and nothing differs."""
        return bool(self.released.values) and not self.differences


def compare(
    part: str, released: Sequence[Measured], patched: Sequence[Measured]
) -> list[Comparison]:
    """Compare value by value; one that only one tree has is a difference.

    Raises:
        Failed: the trees were not measured alike.
    """
    ours, theirs = [m.name for m in patched], [m.name for m in released]
    if ours != theirs:
        raise Failed(f"{part}: the released tree gave {theirs}, the patched one {ours}.")
    return [
        Comparison(part, old, new, _differences(old.values, new.values))
        for old, new in zip(released, patched, strict=True)
    ]


def _differences(old: dict[str, str], new: dict[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {name: (old.get(name, "absent"), new.get(name, "absent")) for name in old | new}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
