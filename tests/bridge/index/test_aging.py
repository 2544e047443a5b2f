"""How far steps and versions are behind, whatever numbers a trainer says in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.index.aging import LARGEST_JUMP, LastUsed, ages

ABSURD = (1 << 60, 99_999_999_999, (1 << 31) - 1)


def _ages(said: list[int]) -> dict[int, int]:
    used = LastUsed()
    for number in said:
        used.use(number)
    order = list(used)
    return dict(zip(order, ages(order), strict=True))


def test_numbers_that_count_up_are_behind_by_their_difference() -> None:
    assert _ages([0, 1, 2, 10]) == {0: 10, 1: 9, 2: 8, 10: 0}


def test_a_slow_engine_that_still_uses_an_old_version_ages_nothing() -> None:
    assert _ages([12, 13, 14, 15, 12]) == {13: 2, 14: 1, 15: 0, 12: 0}


def test_after_going_back_what_is_used_again_is_new() -> None:
    said = [*range(100, 106), 100, 101, 102]
    found = _ages(said)
    assert [found[step] for step in (100, 101, 102)] == [2, 1, 0]
    assert [found[step] for step in (104, 105)] == [1, 0]


@pytest.mark.parametrize("absurd", ABSURD)
def test_a_number_far_from_all_others_makes_nothing_old(absurd: int) -> None:
    assert _ages([11, 12, absurd]) == {11: 2, 12: 1, absurd: 0}
    assert _ages([11, 12, absurd, 13]) == {11: 2, 12: 1, absurd: 1, 13: 0}
    assert _ages([absurd, *range(20)])[absurd] == 20


SAID = st.lists(st.integers(0, 40) | st.sampled_from(ABSURD), min_size=1, max_size=60)


@given(SAID, st.integers(1, 5))
def test_what_is_used_now_is_kept_and_what_is_kept_is_bounded(said: list[int], keep: int) -> None:
    found = _ages(said)
    assert found[said[-1]] == 0
    kept = [number for number, age in found.items() if age < keep]
    assert len(kept) <= 2 * keep


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 20))
def test_steps_begun_anew_are_behind_by_no_more_than_as_if_nothing_had_been_before(
    highest: int, checkpoint: int, steps: int
) -> None:
    anew = range(checkpoint, checkpoint + steps)
    found = _ages([*range(highest + 1), *anew])
    assert all(found[step] <= anew[-1] - step for step in anew)


@given(st.lists(st.integers(0, LARGEST_JUMP), unique=True, min_size=1).map(sorted))
def test_in_order_it_is_the_distance_to_the_newest(values: list[int]) -> None:
    assert ages(values) == [values[-1] - value for value in values]
