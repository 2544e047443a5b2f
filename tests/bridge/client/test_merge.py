"""What several bridges answer, put together: nothing is taken that belongs to another row."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge.client.merge import (
    completed,
    elsewhere,
    joined_digests,
    joined_summaries,
    require_one_meaning,
    summed_gc,
    summed_stats,
)
from bridge.client.records import TrajectoryRecords
from bridge.errors import MixedWeights
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.transport.bridge_sharding import row_number, shard_of
from bridge.wire import DigestsReply, GcReply, StatsReply, TrajectoryState, TrajectorySummary

SHAPE = ModelShape(2, 16, 16, 4, 2, 1, 16, (0, 1), (0, 1))
LAYOUT = RecordLayout(SHAPE, (1,), (Site.FC1, Site.K, Site.ROUTES))
WIDTHS = {"forward": LAYOUT.row_bytes(Part.FORWARD), "kv": LAYOUT.row_bytes(Part.KV)}


def records(
    rows: list[int],
    fill: int = 0,
    forward: list[bool] | None = None,
    kv: list[bool] | None = None,
    versions: tuple[str, ...] = (),
    version_index: list[int] | None = None,
    engines: tuple[str, ...] = ("e",),
    engine_index: list[int] | None = None,
    **other: Any,
) -> TrajectoryRecords:
    """Records of so many positions; a row that is there has the bytes ``fill``, others zero."""
    count = len(rows)
    valid = {"forward": forward or [False] * count, "kv": kv or [False] * count}
    parts: dict[str, Any] = {}
    for part, held in valid.items():
        parts[f"{part}_valid"] = torch.tensor(held, dtype=torch.bool)
        parts[part] = (parts[f"{part}_valid"][:, None] * fill).to(torch.uint8)
        parts[part] = parts[part].expand(count, WIDTHS[part]).clone()
    values: dict[str, Any] = {
        "trajectory": "t",
        "state": TrajectoryState.FINISHED,
        "start": 0,
        "length": count,
        "layout": LAYOUT,
        "kv_scales": {},
        "tokens": torch.zeros(count, dtype=torch.int32),
        **parts,
        "weight_versions": versions,
        "weights": ("",) * len(versions),
        "weight_version_index": torch.tensor(version_index or [-1] * count, dtype=torch.int32),
        "engine_ids": engines,
        "engine_index": torch.tensor(engine_index or [0] * count, dtype=torch.int32),
        "rows": torch.tensor(rows, dtype=torch.int64),
        "revision": 1,
    }
    return TrajectoryRecords(**(values | other))


def bytes_at(found: TrajectoryRecords, part: str) -> list[int]:
    """The byte that every position's row is made of."""
    rows = getattr(found, part)
    assert rows.shape[1] == WIDTHS[part] > 0
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


class TestElsewhere:
    def test_rows_of_other_homes_are_asked_for_there_and_nowhere_else(self) -> None:
        rows = [row_number(0, home) for home in (0, 2, 1, 2, 0)]
        assert elsewhere(records(rows), 0) == {1: slice(2, 3), 2: slice(1, 4)}
        assert elsewhere(records(rows), 2) == {0: slice(0, 5), 1: slice(2, 3)}

    def test_rows_that_are_held_are_not_asked_for(self) -> None:
        rows = [row_number(count, 1) for count in range(3)]
        held = records(rows, 7, forward=[True, False, True], kv=[True] * 3)
        assert elsewhere(held, 0) == {1: slice(1, 2)}
        lacks_kv = records(rows, 7, forward=[True] * 3, kv=[True, True, False])
        assert elsewhere(lacks_kv, 0) == {1: slice(2, 3)}
        assert elsewhere(records(rows, 7, forward=[True] * 3, kv=[True] * 3), 0) == {}

    def test_what_the_home_itself_lacks_and_positions_without_a_row_are_asked_of_nobody(
        self,
    ) -> None:
        assert elsewhere(records([row_number(0, 1), -1, -1]), 1) == {}
        assert elsewhere(records([-1, row_number(0, 1), -1]), 0) == {1: slice(1, 2)}

    def test_the_bridges_are_plain_numbers(self) -> None:
        ((number, at),) = elsewhere(records([row_number(4, 1)]), 0).items()
        assert (type(number), type(at.start), type(at.stop)) == (int, int, int)


class TestCompleted:
    def test_a_row_that_the_home_lacks_is_taken_with_its_validity(self) -> None:
        mine = records([10, 11, 12], 1, forward=[True, False, False], kv=[False, True, False])
        other = records([10, 11, 12], 2, forward=[True, True, False], kv=[True, True, False])
        found = completed(mine, other, slice(0, 3))
        assert bytes_at(found, "forward") == [1, 2, 0]
        assert found.forward_valid.tolist() == [True, True, False]
        assert bytes_at(found, "kv") == [2, 1, 0]
        assert found.kv_valid.tolist() == [True, True, False]

    def test_another_engines_row_of_the_same_number_is_not_taken(self) -> None:
        mine = records([10, 11], engines=("a", "b"), engine_index=[0, 1])
        other = records([10, 11], 2, [True] * 2, [True] * 2, ("v",), [0, 0], ("b", "c"), [0, 0])
        found = completed(mine, other, slice(0, 2))
        assert bytes_at(found, "forward") == bytes_at(found, "kv") == [0, 2]
        assert found.forward_valid.tolist() == found.kv_valid.tolist() == [False, True]
        assert found.weight_version_index.tolist() == [-1, 0]

    def test_an_engine_that_is_listed_at_another_place_is_the_same_engine(self) -> None:
        mine = records([10], engines=("a", "b"), engine_index=[1])
        other = records([10], 2, [True], [True], engines=("b",), engine_index=[0])
        assert completed(mine, other, slice(0, 1)).forward_valid.tolist() == [True]

    def test_another_row_of_the_same_engine_is_not_taken(self) -> None:
        mine = records([10, 11])
        other = records([11, 10], 2, [True] * 2, [True] * 2, ("v",), [0, 0])
        found = completed(mine, other, slice(0, 2))
        assert not found.forward_valid.any()
        assert not found.kv_valid.any()
        assert bytes_at(found, "forward") == [0, 0]
        assert found.weight_version_index.tolist() == [-1, -1]

    def test_a_row_that_the_other_bridge_lacks_stays_missing(self) -> None:
        mine = records([10, 11])
        other = records([10, 11], 2, [False, True], [True, False])
        # Its bytes mean nothing, whatever they are.
        other.forward[:], other.kv[:] = 9, 9
        found = completed(mine, other, slice(0, 2))
        assert found.forward_valid.tolist() == [False, True]
        assert found.kv_valid.tolist() == [True, False]
        assert bytes_at(found, "forward") == [0, 9]
        assert bytes_at(found, "kv") == [9, 0]

    def test_a_row_that_the_home_holds_is_left_as_it_is(self) -> None:
        mine = records([10], 1, [True], [True], ("v",), [0])
        found = completed(mine, records([10], 2, [True], [True], ("w",), [0]), slice(0, 1))
        assert bytes_at(found, "forward") == bytes_at(found, "kv") == [1]
        assert found.weight_version_index.tolist() == [0]

    @pytest.mark.parametrize(
        ("answered", "taken"), [(1, [0, 2, 0, 0]), (2, [0, 2, 2, 0]), (3, [0, 2, 2, 0])]
    )
    def test_only_the_positions_that_were_asked_for_and_answered_are_filled(
        self, answered: int, taken: list[int]
    ) -> None:
        mine = records([10, 11, 12, 13])
        rows = [11, 12, 13][:answered]
        each = [True] * answered
        other = records(rows, 2, each, each, ("v",), [0] * answered)
        found = completed(mine, other, slice(1, 3))
        assert bytes_at(found, "forward") == bytes_at(found, "kv") == taken
        assert found.weight_version_index.tolist() == [0 if byte else -1 for byte in taken]

    @pytest.mark.parametrize("at", [slice(0, 0), slice(2, 2)])
    def test_no_positions_change_nothing(self, at: slice) -> None:
        other = records([10, 11], 2, [True] * 2, [True] * 2)
        assert not completed(records([10, 11]), other, at).forward_valid.any()

    @pytest.mark.parametrize(
        "changed",
        [
            {"layout": replace(LAYOUT, bits=2)},
            {"kv_scales": {1: (0.5, 2.0)}},
            {"layout": replace(LAYOUT, bits=2), "kv_scales": {1: (0.5, 2.0)}},
        ],
    )
    def test_rows_of_another_layout_or_other_scales_are_not_taken(
        self, changed: dict[str, Any]
    ) -> None:
        mine = records([10])
        other = records([10], 2, [True], [True], **changed)
        found = completed(mine, other, slice(0, 1))
        assert found is mine
        assert not found.forward_valid.any()
        assert bytes_at(found, "forward") == [0]

    def test_versions_are_joined_by_name_and_known_ones_stay(self) -> None:
        mine = records([10, 11, 12, 13], versions=("3", "4"), version_index=[1, -1, -1, -1])
        other = records([10, 11, 12, 13], versions=("5", "3"), version_index=[0, 1, 0, -1])
        found = completed(mine, other, slice(0, 4))
        assert found.weight_versions == ("3", "4", "5")
        assert found.weight_version_index.tolist() == [1, 0, 2, -1]

    def test_a_label_with_another_digest_is_another_version(self) -> None:
        mine = records([10, 11, 12], versions=("1",), version_index=[0, -1, -1], weights=("aa",))
        other = records(
            [10, 11, 12], versions=("1", "1"), version_index=[0, 1, 0], weights=("bb", "aa")
        )
        found = completed(mine, other, slice(0, 3))
        assert found.weight_versions == ("1", "1")
        assert found.weights == ("aa", "bb")
        assert found.weight_version_index.tolist() == [0, 0, 1]

    def test_everything_else_stays_as_the_home_said_it(self) -> None:
        mine = records([10], start=0, revision=4, state=TrajectoryState.OPEN)
        other = records([10], 2, [True], [True], revision=5)
        found = completed(mine, other, slice(0, 1))
        changing = {"weight_versions", "weights", "forward", "kv", "forward_valid", "kv_valid"}
        for field in fields(TrajectoryRecords):
            if field.name not in changing:
                assert getattr(found, field.name) is getattr(mine, field.name)

    @given(data=st.data())
    def test_whatever_is_taken_is_the_row_of_that_engine_and_number(
        self, data: st.DataObject
    ) -> None:
        """Bytes are a function of engine and number here, so that a wrong row is another byte."""
        count = data.draw(st.integers(1, 6))
        draw_rows = st.lists(st.sampled_from([0, 1, 2]), min_size=count, max_size=count)
        draw_flags = st.lists(st.booleans(), min_size=count, max_size=count)
        pair = [
            self._drawn(data.draw(draw_rows), data.draw(draw_rows), data.draw(draw_flags))
            for _ in range(2)
        ]
        held = [one.forward_valid.clone() for one in pair]
        found = completed(*pair, slice(0, count))
        for position in range(count):
            same = pair[0].rows[position] == pair[1].rows[position] and (
                pair[0].engine_index[position] == pair[1].engine_index[position]
            )
            valid = bool(held[0][position] or (same and held[1][position]))
            assert bool(found.forward_valid[position]) == valid
            expected = 1 + 10 * int(found.engine_index[position]) + int(found.rows[position])
            assert int(found.forward[position, 0]) == (expected if valid else 0)

    @staticmethod
    def _drawn(rows: list[int], engines: list[int], held: list[bool]) -> TrajectoryRecords:
        drawn = records(rows, 1, held, held, engines=("a", "b", "c"), engine_index=engines)
        salt_T = (10 * np.array(engines) + np.array(rows)) * np.array(held)
        drawn.forward.add_(torch.from_numpy(salt_T.astype(np.uint8))[:, None])
        return drawn


class TestOneMeaning:
    @pytest.mark.parametrize(
        "pairs",
        [
            (),
            (("1", "aa"),),
            (("1", "aa"), ("2", "bb")),
            (("1", "aa"), ("2", "aa")),
            (("1", "aa"), ("1", "")),
            (("1", ""), ("1", "aa")),
        ],
    )
    def test_labels_of_one_digest_or_of_none_pass(self, pairs: tuple[tuple[str, str], ...]) -> None:
        versions, weights = ((pair[at] for pair in pairs) for at in (0, 1))
        mine = records([1], versions=tuple(versions), weights=tuple(weights))
        assert require_one_meaning(mine) is mine

    @pytest.mark.parametrize("weights", [("aa", "bb", ""), ("", "aa", "bb"), ("aa", "", "bb")])
    def test_a_label_of_two_digests_is_refused_by_its_name(self, weights: tuple[str, ...]) -> None:
        mine = records([1], versions=("1", "1", "1"), weights=weights, engines=("left", "right"))
        with pytest.raises(
            MixedWeights, match=r"'t' .* both called '1', by left and right; generate it again"
        ):
            require_one_meaning(mine)


def summary(trajectory: str, **changed: Any) -> TrajectorySummary:
    base = TrajectorySummary(trajectory, "finished", 10, 6, 5, 3, 4, ("1",), 100)
    return replace(base, **changed)


class TestSummaries:
    def test_rows_add_up_and_what_others_hold_is_not_missing(self) -> None:
        home = shard_of("t", 2)
        replies = [[summary("t")], [summary("t")]]
        replies[1 - home] = [
            summary(
                "t", state="open", tokens=8, rows=2, kv_rows=1, nbytes=7, weight_versions=("2",)
            )
        ]
        (joined,) = joined_summaries(replies)
        expected = TrajectorySummary("t", "finished", 10, 8, 6, 1, 3, ("1", "2"), 107)
        assert set(joined.weight_versions) == {"1", "2"}
        assert replace(joined, weight_versions=("1", "2")) == expected

    def test_no_more_rows_are_missing_than_none(self) -> None:
        home = shard_of("t", 2)
        replies = [[summary("t")], [summary("t")]]
        replies[1 - home] = [summary("t", rows=4, kv_rows=9)]
        (joined,) = joined_summaries(replies)
        assert (joined.missing_forward, joined.missing_kv) == (0, 0)

    def test_a_home_that_lost_the_trajectory_does_not_hide_the_others(self) -> None:
        home = shard_of("t", 3)
        replies: list[list[TrajectorySummary]] = [[], [], []]
        replies[(home + 1) % 3] = [summary("t", state="open")]
        (joined,) = joined_summaries(replies)
        assert joined == summary("t", state="open")

    def test_trajectories_stand_in_the_order_in_which_they_were_first_named(self) -> None:
        replies = [[summary("b"), summary("a")], [summary("c"), summary("a")]]
        assert [item.trajectory for item in joined_summaries(replies)] == ["b", "a", "c"]

    def test_nothing_is_nothing(self) -> None:
        assert joined_summaries([]) == joined_summaries([[], []]) == []


def test_digests_of_an_engine_are_joined_from_all_bridges() -> None:
    replies = [
        DigestsReply({"a": {"w": "1", "x": "2"}, "b": {"w": "3"}}),
        DigestsReply({"a": {"x": "4", "y": "5"}}),
    ]
    assert joined_digests(replies) == {"a": {"w": "1", "x": "4", "y": "5"}, "b": {"w": "3"}}
    assert joined_digests([]) == {}


def test_what_was_collected_is_summed() -> None:
    assert summed_gc([GcReply(1, 20, 300), GcReply(4, 50, 600)]) == GcReply(5, 70, 900)


class TestStats:
    @staticmethod
    def reply(store: str, first: int) -> StatsReply:
        """Counters that are all different, counted on from ``first``."""
        counters = [name for name in StatsReply.__struct_fields__ if name != "store"]
        numbers = {name: first + place for place, name in enumerate(counters)}
        return StatsReply(store=store, **numbers)

    def test_one_bridges_counters_stay_as_they_are(self) -> None:
        alone = self.reply("disk", 1)
        assert summed_stats([alone]) is alone

    def test_counters_are_summed_but_for_those_that_are_the_same_everywhere(self) -> None:
        replies = [self.reply("memory", 1000), self.reply("disk", 1), self.reply("disk", 100)]
        joined = summed_stats(replies)
        assert joined.store == "memory, disk"
        for name in StatsReply.__struct_fields__:
            each = [getattr(reply, name) for reply in replies]
            if name in ("step", "engines", "full"):
                assert getattr(joined, name) == max(each)
            elif name != "store":
                assert getattr(joined, name) == sum(each)
