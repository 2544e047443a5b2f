"""Mutations that no test can notice, each with the reason.

They are counted as survivors all the same. A reason belongs to the changed line, not to its number.
"""

from __future__ import annotations

from tests.mutation.mutants import Mutant

# path -> changed line -> why nothing computes otherwise
REASONS: dict[str, dict[str, str]] = {}


def reason(path: str, mutant: Mutant) -> str:
    """Return why a mutation changes nothing, or an empty text if nobody has said so."""
    return REASONS.get(path, {}).get(mutant.after, "")
