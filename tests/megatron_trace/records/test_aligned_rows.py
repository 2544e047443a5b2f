"""Rows are put where the model computes their tokens, or are missing there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bridge.client.records import TrajectoryRecords
from bridge.errors import TokenMismatch, WeightVersionMismatch
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.wire import TrajectoryState
from megatron_trace.records.aligned_rows import (
    AlignedRows,
    SequenceCountMismatch,
    VersionPolicy,
    align_rows,
)
from megatron_trace.records.token_placement import PlacementError, TokenPlacement
from megatron_trace.rounding.rows import RowState

LAYOUT = RecordLayout(
    ModelShape(2, 16, 16, 4, 2, 1, 16, (0, 1), (0, 1)), (1,), (Site.FC1, Site.K, Site.ROUTES)
)
FORWARD, KV = (LAYOUT.row_bytes(part) for part in Part)
PADDING, MISSING, RECORDED = RowState.PADDING, RowState.MISSING, RowState.RECORDED
ANY = VersionPolicy(None, 0, strict=True)


def record(tokens: list[int], first_byte: int, **changed: Any) -> TrajectoryRecords:
    """A finished trajectory of version "1" that begins at 0; its last token has no row.

    The bytes of position i are ``first_byte + i`` in the forward row and 100 more in K and V.
    """
    count = len(tokens)
    bytes_T = torch.arange(first_byte, first_byte + count).to(torch.uint8)[:, None]
    valid = torch.arange(count) < count - 1
    values: dict[str, Any] = {
        "trajectory": "t",
        "state": TrajectoryState.FINISHED,
        "start": 0,
        "length": count,
        "layout": LAYOUT,
        "kv_scales": {},
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "forward": bytes_T.expand(count, FORWARD).contiguous(),
        "forward_valid": valid,
        "kv": (bytes_T + 100).expand(count, KV).contiguous(),
        "kv_valid": valid.clone(),
        "weight_versions": ("1",),
        "weight_version_index": torch.where(valid, 0, -1).to(torch.int32),
        "engine_ids": ("e",),
        "engine_index": torch.zeros(count, dtype=torch.int32),
        "rows": torch.arange(count),
        "revision": 1,
    }
    return TrajectoryRecords(**(values | changed))


def placed(
    records: list[TrajectoryRecords | None], placement: TokenPlacement, policy: VersionPolicy = ANY
) -> AlignedRows:
    return align_rows(records, LAYOUT, placement, policy)


def packed(*sequences: list[int]) -> TokenPlacement:
    ends = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    return TokenPlacement.packed(
        torch.tensor([token for s in sequences for token in s]), ends, None
    )


def bytes_of(rows: Tensor) -> list[int]:
    assert rows.dtype is torch.uint8
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


class TestPlacing:
    def test_a_padded_batch_is_in_the_models_order(self) -> None:
        """The model computes [s, b]: position by position, the sequences side by side."""
        tokens_bs = torch.tensor([[5, 6, 7], [8, 9, 0]])
        found = placed(
            [record([5, 6, 7], 10), record([8, 9], 20)], TokenPlacement.padded(tokens_bs, [3, 2])
        )
        assert bytes_of(found.forward_rows) == [10, 20, 11, 0, 0, 0]
        assert bytes_of(found.kv_rows) == [110, 120, 111, 0, 0, 0]
        states = [RECORDED, RECORDED, RECORDED, PADDING, PADDING, PADDING]
        assert found.forward_state.tolist() == found.kv_state.tolist() == states
        assert found.forward_rows.shape == (6, FORWARD)
        assert found.kv_rows.shape == (6, KV)
        assert found.forward_state.dtype is found.kv_state.dtype is torch.uint8

    def test_a_sequence_without_a_record_is_missing_and_the_pad_between_is_not(self) -> None:
        placement = TokenPlacement.packed(
            torch.tensor([[5, 6, 0, 8, 9, 1, 0]]), [0, 2, 5], [0, 3, 7]
        )
        found = placed([None, record([8, 9, 1], 20)], placement)
        assert found.forward_state.tolist() == found.kv_state.tolist() == [
            MISSING, MISSING, PADDING, RECORDED, RECORDED, PADDING, PADDING,
        ]  # fmt: skip
        assert bytes_of(found.forward_rows) == [0, 0, 0, 20, 21, 0, 0]

    def test_invalid_rows_are_missing_and_their_bytes_are_left_out(self) -> None:
        one = record(
            [5, 6, 7, 8],
            10,
            forward_valid=torch.tensor([True, False, True, False]),
            kv_valid=torch.tensor([False, True, True, False]),
        )
        found = placed([one], packed([5, 6, 7, 8]))
        assert found.forward_state.tolist() == [RECORDED, MISSING, RECORDED, PADDING]
        assert found.kv_state.tolist() == [MISSING, RECORDED, RECORDED, PADDING]
        assert bytes_of(found.forward_rows) == [10, 0, 12, 0]
        assert bytes_of(found.kv_rows) == [0, 111, 112, 0]

    def test_a_last_token_that_was_consumed_has_its_row(self) -> None:
        held = torch.tensor([True, True])
        found = placed([record([5, 6], 10, forward_valid=held, kv_valid=held)], packed([5, 6]))
        assert found.forward_state.tolist() == [RECORDED, RECORDED]
        assert bytes_of(found.forward_rows) == [10, 11]

    def test_the_last_token_of_a_longer_trajectory_is_missing_not_padding(self) -> None:
        found = placed([record([5, 6], 10, length=3)], packed([5, 6]))
        assert found.forward_state.tolist() == found.kv_state.tolist() == [RECORDED, MISSING]

    def test_a_record_of_later_positions_is_put_there(self) -> None:
        found = placed([record([7, 8, 9], 10, start=2, length=5)], packed([5, 6, 7, 8, 9]))
        assert found.forward_state.tolist() == [MISSING, MISSING, RECORDED, RECORDED, PADDING]
        assert bytes_of(found.forward_rows) == [0, 0, 10, 11, 0]

    @pytest.mark.parametrize("start", [2, 3])
    def test_a_record_behind_the_end_of_the_sequence_leaves_it_missing(self, start: int) -> None:
        found = placed([record([7, 8], 10, start=start, length=start + 2)], packed([5, 6]))
        assert found.forward_state.tolist() == [MISSING, MISSING]
        assert bytes_of(found.forward_rows) == [0, 0]

    def test_a_longer_record_guides_the_positions_that_there_are(self) -> None:
        found = placed([record([5, 6, 7, 8], 10)], packed([5, 6]))
        assert found.forward_state.tolist() == [RECORDED, RECORDED]
        assert bytes_of(found.kv_rows) == [110, 111]

    def test_a_shorter_record_leaves_the_rest_missing(self) -> None:
        found = placed([record([5, 6], 10, length=4)], packed([5, 6, 7, 8]))
        assert found.forward_state.tolist() == [RECORDED, MISSING, MISSING, MISSING]

    def test_empty_sequences_have_no_rows(self) -> None:
        found = placed([None, record([5], 10)], packed([], [5]))
        assert found.forward_state.tolist() == [PADDING]
        assert placed([], packed()).num_tokens == 0

    @settings(deadline=None)
    @given(data=st.data())
    def test_every_token_gets_the_row_of_its_own_sequence_and_position(
        self, data: st.DataObject
    ) -> None:
        lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
        sequences = [[100 * i + k for k in range(n)] for i, n in enumerate(lengths)]
        if data.draw(st.booleans()):
            placement = packed(*sequences)
        else:
            longest = max(lengths) + data.draw(st.integers(0, 2))
            rows = [s + [0] * (longest - len(s)) for s in sequences]
            placement = TokenPlacement.padded(torch.tensor(rows).reshape(len(rows), -1), lengths)
        found = placed([record(s, 10 * i) for i, s in enumerate(sequences)], placement)
        for state, byte, token in zip(
            found.forward_state.tolist(),
            bytes_of(found.forward_rows) if found.num_tokens else [],
            placement.tokens.tolist(),
            strict=True,
        ):
            if state == RECORDED:
                assert byte == 10 * (token // 100) + token % 100
        assert (found.forward_state == RECORDED).sum() == sum(max(0, n - 1) for n in lengths)
        assert not (found.forward_state == MISSING).any()

    def test_there_is_a_record_or_none_for_every_sequence(self) -> None:
        sentence = (
            "1 records were passed for 2 sequences: pass one for each sequence, None where nothing "
            "was recorded, and pad_sequence=True if the last sequence of cu_seqlens is padding."
        )
        with pytest.raises(SequenceCountMismatch, match=f"^{re.escape(sentence)}$"):
            placed([None], packed([5], [6]))


class TestTokens:
    def test_another_token_is_named_with_its_trajectory_and_position(self) -> None:
        one = record([7, 8, 4], 10, start=1, length=4)
        sentence = (
            "Trajectory 't' has token 8 at position 2, the trainer has 9: pass the sequences in "
            "the order of the records, tokenized as the rollout saw them."
        )
        with pytest.raises(TokenMismatch, match=f"^{re.escape(sentence)}$"):
            placed([one], packed([5, 7, 9, 4]))

    def test_a_token_that_nobody_told_matches_any_and_zero_matches_zero_alone(self) -> None:
        found = placed([record([-1, 6, 0], 10)], packed([5, 6, 0]))
        assert found.forward_state.tolist() == [RECORDED, RECORDED, PADDING]
        with pytest.raises(TokenMismatch, match="token 0 at position 0"):
            placed([record([0, 6], 10)], packed([5, 6]))

    def test_only_shared_positions_are_compared(self) -> None:
        placed([record([5, 6, 7, 8], 10)], packed([5, 6]))
        placed([record([5, 6], 10, length=4)], packed([5, 6, 9, 9]))
        placed([record([7], 10, start=2, length=3)], packed([9, 9]))


MIXED: dict[str, Any] = {
    "weight_versions": ("3", "2", "2+1"),
    "weight_version_index": torch.tensor([0, 1, 2, -1], dtype=torch.int32),
}


class TestVersions:
    @pytest.mark.parametrize(
        ("trainer", "lag", "version", "accepted"),
        [
            ("3", 0, "3", True),
            ("3", 0, "2", False),
            ("3", 0, "03", True),
            ("3", 1, "2", True),
            ("3", 1, "1", False),
            ("3", 2, "1", True),
            ("3", 5, "4", False),
            ("3", 5, "2+1", False),
            ("2+1", 5, "2", False),
            ("2+1", 0, "2+1", True),
            ("abc", 9, "2", False),
            (None, 0, "anything", True),
        ],
    )
    def test_what_a_policy_accepts(
        self, trainer: str | None, lag: int, version: str, accepted: bool
    ) -> None:
        assert VersionPolicy(trainer, lag, strict=False).accepts(version) is accepted

    def test_other_versions_are_missing_where_the_policy_is_not_strict(self) -> None:
        one = record([5, 6, 7, 8], 10, **MIXED)
        found = placed([one], packed([5, 6, 7, 8]), VersionPolicy("3", 1, strict=False))
        assert found.forward_state.tolist() == [RECORDED, RECORDED, MISSING, PADDING]
        assert found.kv_state.tolist() == [RECORDED, RECORDED, MISSING, PADDING]
        assert bytes_of(found.kv_rows) == [110, 111, 0, 0]

    def test_a_strict_policy_names_version_and_position(self) -> None:
        one = record([5, 6, 7, 8], 10, start=2, length=6, **MIXED)
        with pytest.raises(
            WeightVersionMismatch,
            match=r"'t' was computed with weight version '2' at position 3, the trainer holds '3'"
            r".*generate again.*max_version_lag",
        ):
            placed([one], packed([1, 1, 5, 6, 7, 8]), VersionPolicy("3", 0, strict=True))

    def test_a_position_without_a_row_has_no_version_to_refuse(self) -> None:
        unknown = torch.full((2,), -1, dtype=torch.int32)
        one = record([5, 6], 10, weight_versions=("1",), weight_version_index=unknown)
        found = placed([one], packed([5, 6]), VersionPolicy("3", 0, strict=True))
        assert found.forward_state.tolist() == [RECORDED, PADDING]


class TestPlacedRows:
    def test_each_part_has_its_rows_and_states(self) -> None:
        found = placed([record([5, 6, 7], 10)], packed([5, 6, 7]))
        assert found.of(Part.FORWARD) is found.forward_rows
        assert found.of(Part.KV) is found.kv_rows
        assert found.state_of(Part.FORWARD) is found.forward_state
        assert found.state_of(Part.KV) is found.kv_state
        assert found.num_tokens == 3
        assert found.device == torch.device("cpu")

    def test_all_of_it_moves_to_a_device(self) -> None:
        found = placed([record([5, 6, 7], 10)], packed([5, 6, 7]))
        moved = found.to("meta")
        assert isinstance(moved, AlignedRows)
        for name in found.__dataclass_fields__:
            assert getattr(moved, name).device.type == "meta"
        assert moved.forward_rows.shape == (3, FORWARD)
        assert moved.kv_rows.shape == (3, KV)
        assert moved.device.type == "meta"
        assert found.device.type == "cpu"


class TestPlacement:
    def test_a_padded_batch_without_lengths_is_full(self) -> None:
        found = TokenPlacement.padded(torch.tensor([[1, 2], [3, 4], [5, 6]]), None)
        assert found.tokens.tolist() == [1, 3, 5, 2, 4, 6]
        assert [places.tolist() for places in found.sequences] == [[0, 3], [1, 4], [2, 5]]
        assert found.tokens.dtype is torch.int64
        assert found.tokens.device.type == "cpu"

    @pytest.mark.parametrize("lengths", [[3], [3, 3, 3], [3, -1], [3, 4]])
    def test_lengths_that_do_not_fit_are_refused(self, lengths: list[int]) -> None:
        with pytest.raises(PlacementError, match=r"do not fit 2 sequences of 3 tokens\."):
            TokenPlacement.padded(torch.zeros(2, 3), lengths)

    @pytest.mark.parametrize("lengths", [[0, 3], torch.tensor([0, 3])])
    def test_a_length_may_be_anything_from_nothing_to_all(self, lengths: Any) -> None:
        found = TokenPlacement.padded(torch.zeros(2, 3, dtype=torch.int32), lengths)
        assert [places.tolist() for places in found.sequences] == [[], [1, 3, 5]]
        assert found.tokens.dtype is torch.int64

    @pytest.mark.parametrize("shape", [(6,), (1, 2, 3)])
    def test_padded_tokens_have_two_dimensions(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(PlacementError, match=r"not \[b, s\]: pass cu_seqlens with packed"):
            TokenPlacement.padded(torch.zeros(shape), None)

    @pytest.mark.parametrize("shape", [(5,), (1, 5)])
    def test_packed_tokens_follow_each_other(self, shape: tuple[int, ...]) -> None:
        tokens = torch.arange(5, dtype=torch.int32).reshape(shape)
        found = TokenPlacement.packed(tokens, torch.tensor([0, 2, 5]), None)
        assert found.tokens.tolist() == [0, 1, 2, 3, 4]
        assert found.tokens.dtype is torch.int64
        assert [places.tolist() for places in found.sequences] == [[0, 1], [2, 3, 4]]

    def test_padded_starts_leave_room_behind_every_sequence(self) -> None:
        found = TokenPlacement.packed(torch.zeros(8), [0, 2, 3], torch.tensor([0, 4, 8]))
        assert [places.tolist() for places in found.sequences] == [[0, 1], [4]]

    @pytest.mark.parametrize(
        ("lengths", "starts"),
        [([0, 3, 2], None), ([0, 2, 4], [0, 4]), ([0, 2, 4], [0, 2, 4, 4])],
    )
    def test_lists_that_do_not_describe_the_same_sequences_are_refused(
        self, lengths: list[int], starts: list[int] | None
    ) -> None:
        with pytest.raises(PlacementError, match=r"not describe the same sequences: pass ascend"):
            TokenPlacement.packed(torch.zeros(8), lengths, starts)

    def test_lengths_behind_the_tokens_are_refused_and_before_their_end_are_not(self) -> None:
        with pytest.raises(PlacementError, match="end at 6 but there are 5 tokens: pass the tok"):
            TokenPlacement.packed(torch.zeros(5), [0, 2, 4, 6], None)
        assert len(TokenPlacement.packed(torch.zeros(5), [0, 5], None).sequences) == 1
        assert len(TokenPlacement.packed(torch.zeros(5), [0, 4], None).sequences) == 1
        assert TokenPlacement.packed(torch.zeros(5), [0], None).sequences == ()

    def test_tokens_of_a_gpu_are_placed_on_the_cpu(self) -> None:
        """Fake tensors say where they would be."""
        with FakeTensorMode():
            tokens = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
            assert tokens.device.type == "cuda"
            assert TokenPlacement.padded(tokens, [1, 2]).tokens.device.type == "cpu"
            assert TokenPlacement.packed(tokens, [0, 6], None).tokens.device.type == "cpu"

    def test_the_form_is_kept(self) -> None:
        padded = TokenPlacement.padded(torch.zeros(2, 3), None)
        assert (padded.batch, padded.is_packed) == (2, False)
        packed = TokenPlacement.packed(torch.zeros(5), [0, 2, 5], None)
        assert (packed.batch, packed.is_packed) == (1, True)

    def test_the_last_sequence_may_be_padding(self) -> None:
        found = TokenPlacement.packed(torch.arange(5), [0, 2, 5], None).without_last()
        assert [places.tolist() for places in found.sequences] == [[0, 1]]
        assert found.tokens.tolist() == [0, 1, 2, 3, 4]
