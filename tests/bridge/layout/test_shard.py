"""What a rank sends of a row, by slots of experts or by values; no bridge takes part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import LayoutError
from bridge.layout import ModelShape, Part, RecordLayout, Shard, Site, TensorSlice
from bridge.layout import shard as shard_module
from bridge.layout.columns import byte_columns, overlap
from bridge.layout.rank_shards import rank_shards
from bridge.layout.shard import MAX_SHARDS, check_shards

SHAPE = ModelShape(3, 16, 16, 4, 2, 2, 16, (0, 1, 2), (0, 1, 2))
LAYOUT = RecordLayout(SHAPE, (0, 2), (Site.FC1, Site.FC2, Site.K))
# Routes are not recorded, so a forward row is fc1 and two slots of fc2 of 7 bytes each, twice.
SLOTS = Shard(LAYOUT, by_slot=True)


class TestPlaces:
    def test_slots_are_counted_over_all_layers(self) -> None:
        assert SLOTS.slots == 4
        assert SLOTS.slot_bytes == 7
        assert SLOTS.slot_columns.tolist() == [list(range(at, at + 7)) for at in (7, 14, 28, 35)]
        assert SLOTS.other_columns.tolist() == [*range(7), *range(21, 28)]

    def test_the_bitmap_takes_whole_bytes(self) -> None:
        assert SLOTS.head_bytes == 14 + 1
        wide = replace(LAYOUT, shape=replace(SHAPE, top_k=4))
        assert Shard(wide, by_slot=True).head_bytes == 14 + 1
        wider = RecordLayout(replace(SHAPE, top_k=3), (0, 1, 2), (Site.FC2,))
        assert Shard(wider, by_slot=True).slots == 9
        assert Shard(wider, by_slot=True).head_bytes == 2

    def test_a_rank_sends_the_parts_that_its_layout_has(self) -> None:
        assert Shard(LAYOUT).sends(Part.FORWARD) is True
        only_kv = Shard(LAYOUT.narrow(sites=[Site.K]))
        assert (only_kv.sends(Part.FORWARD), only_kv.sends(Part.KV)) == (False, True)

    def test_slots_need_fc2(self) -> None:
        assert Shard(LAYOUT).by_slot is False
        with pytest.raises(
            LayoutError, match=r"^A rank that sends slots of fc2 needs a layout that records fc2\.$"
        ):
            Shard(LAYOUT.narrow(sites=[Site.FC1]), by_slot=True)


class TestWidths:
    def test_a_row_of_values_has_one_width(self) -> None:
        whole = Shard(LAYOUT)
        assert [n for n in range(60) if whole.accepts(Part.FORWARD, n)] == [42]
        assert [n for n in range(60) if whole.accepts(Part.KV, n)] == [12]

    def test_a_row_of_slots_has_room_for_none_to_all(self) -> None:
        accepted = [n for n in range(60) if SLOTS.accepts(Part.FORWARD, n)]
        assert accepted == [15, 22, 29, 36, 43]
        assert [n for n in range(60) if SLOTS.accepts(Part.KV, n)] == [12]

    def test_a_part_that_is_not_sent_has_no_width(self) -> None:
        assert not Shard(LAYOUT.narrow(sites=[Site.K])).accepts(Part.FORWARD, 0)


class TestPacking:
    ROW = np.arange(42, dtype=np.uint8)[None]

    @pytest.mark.parametrize(
        ("computed", "bitmap", "sent"),
        [
            ((0, 0, 0, 0), 0b0000, ()),
            ((1, 0, 0, 0), 0b0001, (7,)),
            ((0, 1, 0, 1), 0b1010, (14, 35)),
            ((1, 1, 1, 1), 0b1111, (7, 14, 28, 35)),
        ],
    )
    def test_known_rows(self, computed: Any, bitmap: int, sent: tuple[int, ...]) -> None:
        packed = SLOTS.pack(self.ROW, np.array([computed], np.bool_))
        slots = [byte for at in sent for byte in range(at, at + 7)]
        assert packed.tolist() == [[*range(7), *range(21, 28), bitmap, *slots]]
        assert packed.dtype == np.uint8

    def test_rows_are_as_wide_as_the_fullest_and_the_rest_is_zero(self) -> None:
        computed = np.array([[0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], np.bool_)
        packed = SLOTS.pack(self.ROW.repeat(3, axis=0), computed)
        assert packed.shape == (3, 15 + 2 * 7)
        assert packed[0, 15:].tolist() == [*range(28, 35), *[0] * 7]
        assert packed[1, 15:].tolist() == [*range(7, 21)]
        assert not packed[2, 15:].any()
        held, cells = SLOTS.unpacked(packed)
        assert held.dtype == np.bool_
        np.testing.assert_array_equal(held, computed)
        assert cells.shape == (3, 2, 7)
        assert cells[1].tolist() == [[*range(7, 14)], [*range(14, 21)]]

    def test_no_rows_are_packed_and_unpacked(self) -> None:
        packed = SLOTS.pack(self.ROW[:0], np.zeros((0, 4), np.bool_))
        assert packed.shape == (0, 15)
        held, _ = SLOTS.unpacked(np.zeros((0, 22), np.uint8))
        assert held.shape == (0, 4)

    def test_a_row_that_names_more_slots_than_it_has_room_for_holds_none(self) -> None:
        packed = SLOTS.pack(self.ROW.repeat(2, axis=0), np.array([[1, 0, 0, 0]] * 2, np.bool_))
        packed[0, 14] = 0b0110
        held, _ = SLOTS.unpacked(packed)
        assert held.tolist() == [[False] * 4, [True, False, False, False]]

    def test_bits_behind_the_last_slot_mean_nothing(self) -> None:
        packed = SLOTS.pack(self.ROW, np.array([[0, 0, 0, 1]], np.bool_))
        packed[0, 14] |= 0xF0
        assert SLOTS.unpacked(packed)[0].tolist() == [[False, False, False, True]]

    @given(data=st.data())
    def test_every_slot_comes_back_from_where_it_was_put(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 4))
        flags = st.lists(st.booleans(), min_size=4, max_size=4)
        computed = np.array([data.draw(flags) for _ in range(count)])
        rows = np.random.default_rng(count).integers(0, 256, (count, 42), dtype=np.uint8)
        held, cells = SLOTS.unpacked(SLOTS.pack(rows, computed))
        np.testing.assert_array_equal(held, computed)
        for row in range(count):
            for place, slot in enumerate(np.flatnonzero(computed[row])):
                expected = rows[row, SLOTS.slot_columns[slot]]
                np.testing.assert_array_equal(cells[row, place], expected)


class TestWireForm:
    @pytest.mark.parametrize("by_slot", [True, False])
    def test_it_survives_the_round_trip(self, by_slot: bool) -> None:
        narrowed = LAYOUT.narrow((2,), [Site.FC2], TensorSlice((0, 16), (1, 2)))
        shard = Shard(narrowed, by_slot)
        assert Shard.from_dict(LAYOUT, shard.to_dict()) == shard

    def test_it_is_made_of_plain_values(self) -> None:
        data = SLOTS.to_dict()
        assert type(data["layers"]) is list
        assert type(data["sites"][0]) is str

    @pytest.mark.parametrize(
        "change",
        [{"layers": [0, True]}, {"layers": [0.0]}, {"by_slot": 1}, {"by_slot": None}],
    )
    def test_values_of_another_type_are_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(
            TypeError, match=r"^a shard's layers are integers and by_slot is true or false$"
        ):
            Shard.from_dict(LAYOUT, SLOTS.to_dict() | change)

    @pytest.mark.parametrize("entry", ["layers", "sites", "tensor_slice", "by_slot"])
    def test_a_missing_entry_is_refused(self, entry: str) -> None:
        data = SLOTS.to_dict()
        del data[entry]
        with pytest.raises(KeyError, match=entry):
            Shard.from_dict(LAYOUT, data)


class TestCompleteness:
    def test_slots_of_the_same_layers_are_enough(self) -> None:
        check_shards(LAYOUT, (SLOTS, SLOTS))
        other = Shard(LAYOUT.narrow((2,)), by_slot=True)
        with pytest.raises(
            LayoutError,
            match=r"^Ranks that send slots of fc2 must send slots of the same layers\.$",
        ):
            check_shards(LAYOUT, (SLOTS, other))
        # A rank that sends whole layers is no rank of slots.
        check_shards(LAYOUT, (SLOTS, replace(other, by_slot=False)))

    def test_what_is_missing_is_counted(self) -> None:
        with pytest.raises(
            LayoutError, match=r"send 21 of the 42 bytes of a forward row: let one of them send"
        ):
            check_shards(LAYOUT, (Shard(LAYOUT.narrow((2,))),))
        without_kv = Shard(LAYOUT.narrow(sites=[Site.FC1, Site.FC2]))
        with pytest.raises(LayoutError, match=r"send 0 of the 12 bytes of a kv row"):
            check_shards(LAYOUT, (without_kv,))

    def test_there_are_one_to_sixty_four(self) -> None:
        check_shards(LAYOUT, [Shard(LAYOUT)] * 64)
        for count in (0, 65):
            with pytest.raises(LayoutError, match=r"^shards of an engine is .* between 1 and 64"):
                check_shards(LAYOUT, [Shard(LAYOUT)] * count)
        assert MAX_SHARDS == 64

    def test_their_fields_are_bounded_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A forward row has 2 x 9 fields and a kv row 2 x 2."""
        assert shard_module.MAX_SHARD_FIELDS == 131_072
        monkeypatch.setattr(shard_module, "MAX_SHARD_FIELDS", 2 * 22)
        check_shards(LAYOUT, [Shard(LAYOUT)] * 2)
        with pytest.raises(LayoutError, match=r"^fields of all shards is 66: .* between 0 and 44"):
            check_shards(LAYOUT, [Shard(LAYOUT)] * 3)


class TestOverlap:
    def test_bytes_that_two_shares_have_in_common(self) -> None:
        left = LAYOUT.narrow((0,))
        right = LAYOUT.narrow(sites=[Site.FC2])
        ours, theirs = overlap(LAYOUT, left, right, Part.FORWARD)
        assert ours.tolist() == [*range(7, 21)]
        assert theirs.tolist() == [*range(14)]
        nothing, _ = overlap(LAYOUT, left, LAYOUT.narrow((2,)), Part.FORWARD)
        assert nothing.tolist() == []

    def test_nobody_may_change_columns_that_are_kept_for_others(self) -> None:
        columns = byte_columns(LAYOUT, LAYOUT, Part.KV)
        assert not columns.flags.writeable
        assert columns.dtype == np.int64


class TestRankShards:
    LAYOUT = RecordLayout(ModelShape(2, 64, 128, 8, 2, 4, 32, (0, 1), (0, 1)), (0, 1), tuple(Site))

    def test_one_rank_sends_everything(self) -> None:
        (shard,) = rank_shards(self.LAYOUT, 1)
        assert shard.layout.sites == tuple(Site)
        assert shard.layout.tensor_slice == TensorSlice((0, 128), (0, 4))
        assert not shard.by_slot

    def test_width_and_heads_are_cut_in_the_order_of_the_ranks(self) -> None:
        slices = [shard.layout.tensor_slice for shard in rank_shards(self.LAYOUT, 4)]
        assert slices == [
            TensorSlice((32 * rank, 32 * rank + 32), (rank, rank + 1)) for rank in range(4)
        ]

    def test_ranks_of_one_group_of_experts_stand_next_to_each_other(self) -> None:
        shards = rank_shards(self.LAYOUT, 4, ep=2)
        assert [s.layout.tensor_slice.fc2 for s in shards] == [(0, 64), (64, 128)] * 2
        assert all(shard.by_slot for shard in shards)
        assert [s.layout.tensor_slice.fc2 for s in rank_shards(self.LAYOUT, 4, 4)] == [(0, 128)] * 4

    def test_repeated_heads_are_sent_by_the_first_rank_that_has_them(self) -> None:
        shards = rank_shards(self.LAYOUT, 8)
        heads = [s.layout.tensor_slice.heads if s.sends(Part.KV) else None for s in shards]
        assert heads == [(0, 1), None, (1, 2), None, (2, 3), None, (3, 4), None]

    def test_the_first_rank_alone_sends_routes_and_fc1(self) -> None:
        sites = [shard.layout.sites for shard in rank_shards(self.LAYOUT, 2)]
        assert sites == [tuple(Site), (Site.FC2, Site.K, Site.V)]

    def test_without_fc2_no_rank_sends_slots(self) -> None:
        without = self.LAYOUT.narrow(sites=[Site.FC1, Site.K])
        assert [shard.by_slot for shard in rank_shards(without, 2, 2)] == [False, False]

    @pytest.mark.parametrize("tp", [1, 2, 4, 8])
    def test_together_they_send_every_byte(self, tp: int) -> None:
        check_shards(self.LAYOUT, rank_shards(self.LAYOUT, tp))

    @pytest.mark.parametrize(
        ("tp", "ep", "sentence"),
        [
            (4, 3, r"^4 ranks cannot form 3 equal groups of experts\.$"),
            (6, 6, r"^4 KV heads cannot be repeated equally on 6 ranks\.$"),
            (3, 1, r"^4 cannot be split into 3 equal parts\.$"),
        ],
    )
    def test_what_cannot_be_split_is_refused(self, tp: int, ep: int, sentence: str) -> None:
        with pytest.raises(LayoutError, match=sentence):
            rank_shards(self.LAYOUT, tp, ep)
