"""A rollout replaces what was recorded under its name, or continues it, in any order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bridge.index import Catalog
from bridge.layout import ModelShape, RecordLayout, Site
from bridge.wire import Hello, Trajectory, TrajectoryState

LAYOUT = RecordLayout(ModelShape(1, 64, 32, 8, 2, 1, 16, (0,), (0,)), (0,), (Site.FC1,))
PROMPT = [1, 2]

Position = tuple[int, str, int]


@dataclass(frozen=True)
class Reported:
    """A message that tells a whole trajectory; ``seq`` is when its engine sent it."""

    seq: int
    rollout: int
    continues: bool
    tokens: list[int]
    rows: list[int]
    engine: str = "a"


def applied(messages: Sequence[Reported]) -> tuple[Catalog, dict[int, Reported]]:
    """Apply messages in this order; return what came of them and which entry each is."""
    catalog, entries = Catalog(), {}
    for number, engine in enumerate(("a", "b")):
        catalog.apply(Hello(engine, LAYOUT), 0, number)
    for number, message in enumerate(messages, start=2):
        apply(catalog, message, number)
        entries[number] = message
    return catalog, entries


def apply(catalog: Catalog, message: Reported, number: int) -> None:
    columns = np.array(message.tokens, np.int32), np.array(message.rows, np.int64)
    state = TrajectoryState.FINISHED
    sent = Trajectory(
        message.engine, "t", 0, *columns, state, 0, message.rollout, message.continues
    )
    catalog.check(sent)
    catalog.apply(sent, message.seq, number)


def content(catalog: Catalog) -> list[Position]:
    """Return (token, engine, row) of every position."""
    trajectory = catalog.trajectories["t"]
    names = [*catalog.engines, ""]
    columns = zip(trajectory.tokens, trajectory.engines, trajectory.rows, strict=True)
    return [(int(token), names[engine], int(row)) for token, engine, row in columns]


def test_a_new_rollout_replaces_the_old_one_whole_also_where_the_tokens_are_the_same() -> None:
    old = Reported(1, 1, False, [1, 2, 3, 4], [0, 1, 2, -1])
    new = Reported(2, 2, False, [1, 2, 3], [10, 11, -1])
    assert content(applied([old, new])[0]) == [(1, "a", 10), (2, "a", 11), (3, "", -1)]


def test_a_rollout_that_continues_keeps_the_rows_that_sampled_its_tokens() -> None:
    old = Reported(1, 1, False, [1, 2, 3], [0, 1, -1])
    turn = Reported(2, 2, True, [1, 2, 3, 4], [10, 11, 12, -1])
    assert content(applied([old, turn])[0]) == [(1, "a", 0), (2, "a", 1), (3, "a", 12), (4, "", -1)]


def test_messages_of_one_rollout_merge_whether_it_continues_or_not() -> None:
    begun = Reported(1, 1, False, [1, 2, 3], [0, 1, -1])
    resumed = Reported(2, 1, False, [1, 2, 3, 4], [10, 11, 12, -1])
    assert content(applied([begun, resumed])[0])[:3] == [(1, "a", 0), (2, "a", 1), (3, "a", 12)]


def test_a_late_message_of_a_replaced_rollout_is_ignored_and_its_entry_given_up() -> None:
    new = Reported(2, 2, False, [1, 2, 5], [10, 11, -1])
    late = Reported(1, 1, False, [1, 2, 3, 4], [0, 1, 2, -1])
    catalog, entries = applied([new, late])
    assert content(catalog) == content(applied([new])[0])
    assert [entries[number] for number in catalog.superseded] == [late]


def test_another_engines_rollout_replaces_and_what_it_replaced_does_not_come_back() -> None:
    first = Reported(1, 7, False, [1, 2, 3], [0, 1, -1], "a")
    other = Reported(1, 1, False, [1, 2, 4], [0, 1, -1], "b")
    late = Reported(2, 7, False, [1, 2, 3, 9], [0, 1, 2, -1], "a")
    newer = Reported(3, 8, False, [1, 2, 6], [5, 6, -1], "a")
    assert content(applied([first, other, late])[0]) == content(applied([other])[0])
    assert content(applied([first, other, late, newer])[0]) == content(applied([newer])[0])


def test_a_turn_on_another_engine_keeps_both_engines_rows() -> None:
    first = Reported(1, 7, False, [1, 2, 3], [0, 1, -1], "a")
    turn = Reported(1, 1, True, [1, 2, 3, 4], [0, 1, 2, -1], "b")
    assert content(applied([first, turn])[0]) == [
        (1, "a", 0),
        (2, "a", 1),
        (3, "b", 2),
        (4, "", -1),
    ]


def test_an_engine_that_does_not_number_its_requests_merges() -> None:
    first = Reported(1, 0, False, [1, 2, 3], [0, 1, -1])
    again = Reported(2, 0, False, [1, 2, 3, 4], [10, 11, 12, -1])
    assert content(applied([first, again])[0])[:3] == [(1, "a", 0), (2, "a", 1), (3, "a", 12)]


@st.composite
def histories(draw: st.DrawFn, engines: int = 1) -> list[Reported]:
    """Messages in the order in which engines sent them; all sampled tokens differ."""
    messages: list[Reported] = []
    tokens: list[int] = []
    fresh, row, rollouts = 100, 0, {"a": 0, "b": 0}
    for seq in range(1, 1 + draw(st.integers(1, 6))):
        engine = "ab"[draw(st.integers(0, engines - 1))]
        last = messages[-1] if messages else None
        kind = draw(st.sampled_from(("new", "turn", "same")))
        if kind == "same" and last is not None and last.engine == engine:
            continues = last.continues
        else:
            continues = kind == "turn" and last is not None
            rollouts[engine] += 1
        if not (continues or (kind == "same" and last is not None and last.engine == engine)):
            tokens = list(PROMPT)
        grown = draw(st.integers(1, 3))
        tokens = [*tokens, *range(fresh, fresh + grown)]
        rows = [*range(row, row + len(tokens) - 1), -1]
        fresh, row = fresh + grown, row + len(tokens)
        messages.append(Reported(seq, rollouts[engine], continues, tokens, rows, engine))
    return messages


@given(histories(), st.data())
def test_rollouts_of_an_engine_give_the_same_trajectory_in_any_order(
    messages: list[Reported], data: st.DataObject
) -> None:
    arrived = data.draw(st.permutations(messages))
    assert content(applied(arrived)[0]) == content(applied(messages)[0])


@given(histories(engines=2), st.data())
def test_no_row_of_a_replaced_rollout_is_served(
    messages: list[Reported], data: st.DataObject
) -> None:
    arrived = data.draw(st.permutations(messages))
    last = max(at for at, m in enumerate(arrived) if not m.continues)
    catalog, _ = applied(arrived)
    served = {(engine, row) for _, engine, row in content(catalog) if row >= 0}
    for engine in "ab":
        rollouts = [m.rollout for m in arrived if m.engine == engine and not m.continues]
        begun = max(rollouts, default=0)
        replaced = {r for m in arrived if m.engine == engine and m.rollout < begun for r in m.rows}
        kept = {r for m in arrived if m.engine == engine and m.rollout >= begun for r in m.rows}
        assert not {row for name, row in served if name == engine} & (replaced - kept)
    assert last >= 0


@given(histories(engines=2), st.data())
def test_a_restart_gives_the_same_trajectory_and_goes_on_alike(
    messages: list[Reported], data: st.DataObject
) -> None:
    arrived = data.draw(st.permutations(messages))
    cut = data.draw(st.integers(1, len(arrived)))
    catalog, entries = applied(arrived[:cut])
    again, _ = applied([])
    for number, message in entries.items():
        if number not in catalog.superseded:
            apply(again, message, number)
    assert content(again) == content(catalog)
    for number, message in enumerate(arrived[cut:], start=2 + cut):
        apply(catalog, message, number)
        apply(again, message, number)
    assert content(again) == content(catalog)
