"""The merge rule: rows that produced the sampled tokens stay."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bridge.index import Catalog, TrajectoryMap
from bridge.layout import ModelShape, RecordLayout, Site
from bridge.wire import Hello, Trajectory, TrajectoryState

LAYOUT = RecordLayout(ModelShape(1, 64, 32, 8, 2, 1, 16, (0,), (0,)), (0,), (Site.FC1,))
OPEN, FINISHED = TrajectoryState.OPEN, TrajectoryState.FINISHED


def _merge(
    trajectory: TrajectoryMap,
    tokens: list[int],
    rows: list[int],
    start: int = 0,
    engine: int = 0,
    state: TrajectoryState = OPEN,
) -> TrajectoryMap:
    trajectory.merge(
        start, np.array(tokens, dtype=np.int32), np.array(rows, dtype=np.int64), engine, state
    )
    return trajectory


def _content(trajectory: TrajectoryMap) -> list[tuple[int, int, int]]:
    columns = (trajectory.tokens, trajectory.engines, trajectory.rows)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_retracted_request_keeps_the_rows_that_sampled_its_tokens() -> None:
    trajectory = _merge(TrajectoryMap(), [5, 6, 7, 8], [10, 11, 12, -1])
    _merge(trajectory, [5, 6, 7, 8, 9], [20, 21, 22, 23, -1], state=FINISHED)
    assert _content(trajectory) == [(5, 0, 10), (6, 0, 11), (7, 0, 12), (8, 0, 23), (9, -1, -1)]
    assert trajectory.state is FINISHED


def test_a_second_turn_fills_the_row_of_the_last_sampled_token_and_appends() -> None:
    trajectory = _merge(TrajectoryMap(), [5, 6], [10, -1], state=FINISHED)
    _merge(trajectory, [6, 7, 8], [20, 21, -1], start=1)
    assert _content(trajectory) == [(5, 0, 10), (6, 0, 20), (7, 0, 21), (8, -1, -1)]
    assert trajectory.state is OPEN


def test_a_divergent_history_replaces_the_old_one_to_its_end() -> None:
    trajectory = _merge(TrajectoryMap(), [5, 6, 7, 8, 9], [1, 2, 3, 4, 5])
    _merge(trajectory, [5, 6, 70], [11, 12, 13])
    assert _content(trajectory) == [(5, 0, 1), (6, 0, 2), (70, 0, 13)]


def test_a_shorter_message_with_the_same_tokens_takes_nothing_away() -> None:
    trajectory = _merge(TrajectoryMap(), [5, 6, 7], [1, 2, 3])
    _merge(trajectory, [5, 6], [11, 12])
    assert _content(trajectory) == [(5, 0, 1), (6, 0, 2), (7, 0, 3)]


def test_a_resumed_rollout_on_another_engine_keeps_both_engines_rows() -> None:
    trajectory = _merge(TrajectoryMap(), [5, 6, 7], [1, 2, -1], engine=0)
    _merge(trajectory, [5, 6, 7, 8], [1, 2, 3, 4], engine=1)
    assert _content(trajectory) == [(5, 0, 1), (6, 0, 2), (7, 1, 3), (8, 1, 4)]


def test_positions_that_no_engine_told_are_unknown_until_one_does() -> None:
    trajectory = _merge(TrajectoryMap(), [7, 8], [3, 4], start=2)
    assert _content(trajectory) == [(-1, -1, -1), (-1, -1, -1), (7, 0, 3), (8, 0, 4)]
    _merge(trajectory, [5, 6, 7], [11, 12, 13])
    assert _content(trajectory) == [(5, 0, 11), (6, 0, 12), (7, 0, 3), (8, 0, 4)]


_MESSAGES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 50)), min_size=1, max_size=8),
        st.integers(0, 1),
    ),
    max_size=6,
)


def _reference(messages: list[tuple[int, list[tuple[int, int]], int]]) -> list[tuple[int, ...]]:
    """The rule, one position at a time."""
    held: list[tuple[int, int, int]] = []
    for start, told, engine in messages:
        held += [(-1, -1, -1)] * (start - len(held))
        diverged = False
        for position, (token, row) in enumerate(told, start=start):
            new = (token, engine if row >= 0 else -1, row)
            if position >= len(held):
                held.append(new)
            elif diverged or held[position][0] not in (-1, token):
                if not diverged:
                    del held[start + len(told) :]
                diverged = True
                held[position] = new
            elif held[position][2] == -1:
                held[position] = new
    return held


@given(_MESSAGES)
def test_merging_follows_the_rule_for_any_messages(
    messages: list[tuple[int, list[tuple[int, int]], int]],
) -> None:
    trajectory = TrajectoryMap()
    for start, told, engine in messages:
        tokens, rows = zip(*told, strict=True)
        _merge(trajectory, list(tokens), list(rows), start, engine)
    assert _content(trajectory) == _reference(messages)


@given(_MESSAGES)
def test_merging_the_last_message_again_changes_nothing(
    messages: list[tuple[int, list[tuple[int, int]], int]],
) -> None:
    trajectory = TrajectoryMap()
    for start, told, engine in messages:
        tokens, rows = (list(column) for column in zip(*told, strict=True))
        _merge(trajectory, tokens, rows, start, engine)
        before = _content(trajectory)
        _merge(trajectory, tokens, rows, start, engine)
        assert _content(trajectory) == before


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.randoms(),
)
def test_parts_of_one_history_may_arrive_in_any_order(
    tokens: list[int], cuts: list[int], random: object
) -> None:
    parts = [(max(0, cut - 3), cut) for cut in cuts if cut <= len(tokens)] or [(0, len(tokens))]
    in_order, shuffled = TrajectoryMap(), TrajectoryMap()
    for begin, end in parts:
        _merge(in_order, tokens[begin:end], list(range(begin, end)), begin)
    random.shuffle(parts)  # type: ignore[attr-defined]
    for begin, end in parts:
        _merge(shuffled, tokens[begin:end], list(range(begin, end)), begin)
    assert _content(shuffled) == _content(in_order)


@st.composite
def _growing_histories(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """(tokens, rows) of an engine's messages: grown, computed again, other from some token on."""
    messages: list[tuple[list[int], list[int]]] = []
    tokens: list[int] = []
    fresh, row = 100, 0
    for _ in range(draw(st.integers(1, 6))):
        kept = draw(st.integers(0, len(tokens)) | st.just(len(tokens)))
        grown = draw(st.integers(1, 4))
        tokens = tokens[:kept] + list(range(fresh, fresh + grown))
        fresh += grown
        rows = [row + at if draw(st.booleans()) else -1 for at in range(len(tokens))]
        row += len(tokens)
        messages.append((tokens, rows))
    return messages


@given(_growing_histories(), st.data())
def test_messages_of_an_engine_give_the_same_history_in_any_order(
    messages: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    def told(order: list[int]) -> tuple[list[tuple[int, int, int]], TrajectoryState]:
        catalog = Catalog()
        catalog.apply(Hello("e", LAYOUT), 0, 0)
        for number, at in enumerate(order, start=1):
            state = FINISHED if at == len(messages) - 1 else OPEN
            tokens, rows = messages[at]
            columns = np.array(tokens, dtype=np.int32), np.array(rows, dtype=np.int64)
            catalog.apply(Trajectory("e", "t", 0, *columns, state), at + 1, number)
        trajectory = catalog.trajectories["t"]
        return _content(trajectory), trajectory.state

    in_order = list(range(len(messages)))
    assert told(data.draw(st.permutations(in_order))) == told(in_order)
