"""The mutation run itself: what is changed, and what a trial's end means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="make mutate installs it: requirements/mutation.txt")

from tests.mutation.equivalent import REASONS
from tests.mutation.mutants import mutants_of
from tests.mutation.targets import TARGETS
from tests.mutation.trial import NoVerdict, Verdict, verdict

SOURCE = '''"""A docstring."""
from typing import TypeVar

T = TypeVar("T")
LIMIT = 4


@property
def half(n: int | None) -> int:
    """Another."""
    return n // 2
'''


def test_constants_and_decorated_functions_are_mutated_and_nothing_that_computes_nothing() -> None:
    mutants = list(mutants_of(SOURCE))
    changes = {(mutant.line, mutant.before, mutant.after) for mutant in mutants}
    assert changes == {
        (5, "LIMIT = 4", "LIMIT = 5"),
        (5, "LIMIT = 4", "LIMIT = None"),
        (11, "return n // 2", "return n / 2"),
        (11, "return n // 2", "return n // 3"),
    }
    for mutant in mutants:
        compile(mutant.source, "mutant", "exec")
        assert mutant.source.count("\n") == SOURCE.count("\n")


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (0, Verdict.SURVIVED),
        (1 << 8, Verdict.KILLED),
        (4 << 8, Verdict.KILLED),
        (9, Verdict.KILLED),
    ],
)
def test_failed_tests_and_a_process_that_is_ended_kill_a_mutation(
    status: int, found: Verdict
) -> None:
    assert os.WIFSIGNALED(9)
    assert verdict(status) is found


@pytest.mark.parametrize("code", [5, 70])
def test_a_trial_without_tests_is_no_verdict(code: int) -> None:
    with pytest.raises(NoVerdict, match=f"status {code}; run the target's tests by hand"):
        verdict(code << 8)


def test_every_target_and_its_tests_exist_and_reasons_belong_to_targets() -> None:
    for target in TARGETS:
        assert all(Path(path).is_file() for path in (target.path, *target.tests))
    assert set(REASONS) <= {target.path for target in TARGETS}
