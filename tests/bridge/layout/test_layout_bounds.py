"""The bounds of layouts to the last number, and the sentence with which each is kept."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bridge.errors import LayoutError, SchemaMismatch
from bridge.layout import ModelShape, Part, RecordLayout, Site, TensorSlice, parse_layers
from bridge.layout import record as record_module
from bridge.layout.columns import as_slices, byte_columns, selection
from bridge.layout.shape import check_layers, check_range

SHAPE = ModelShape(4, 64, 32, 64, 4, 2, 16, (1, 2, 3), (0, 1, 3))
DENSE = ModelShape(4, 64, 0, 0, 0, 2, 16, (), (0, 1, 2, 3))
LAYOUT = RecordLayout(SHAPE, (1, 2, 3), tuple(Site), bits=3)


def refused(sentence: str, error: type[Exception] = LayoutError) -> Any:
    """Expect exactly this sentence."""
    return pytest.raises(error, match=f"^{re.escape(sentence)}$")


class TestShape:
    @pytest.mark.parametrize(
        ("name", "low", "high"),
        [
            ("num_layers", 4, 512),
            ("num_kv_heads", 1, 65_536),
            ("hidden_size", 16, 1 << 20),
            ("head_dim", 16, 1 << 20),
            ("moe_intermediate_size", 16, 1 << 20),
            ("num_experts", 4, 65_536),
            ("top_k", 1, 64),
        ],
    )
    def test_sizes_are_accepted_up_to_their_bounds(self, name: str, low: int, high: int) -> None:
        for value in (low, high):
            assert getattr(replace(SHAPE, **{name: value}), name) == value

    @pytest.mark.parametrize(
        ("name", "value", "low", "high"),
        [
            ("num_layers", 0, 1, 512),
            ("num_layers", 513, 1, 512),
            ("num_kv_heads", 0, 1, 65_536),
            ("num_kv_heads", 65_537, 1, 65_536),
            ("hidden_size", 15, 16, 1 << 20),
            ("head_dim", (1 << 20) + 16, 16, 1 << 20),
            ("moe_intermediate_size", 0, 16, 1 << 20),
            ("num_experts", 0, 1, 65_536),
            ("num_experts", 65_537, 1, 65_536),
            ("top_k", 0, 1, 64),
            ("top_k", 65, 1, 64),
        ],
    )
    def test_sizes_beyond_their_bounds_are_refused(
        self, name: str, value: int, low: int, high: int
    ) -> None:
        with refused(f"{name} is {value}: it must lie between {low} and {high}."):
            replace(SHAPE, **{name: value})

    def test_a_token_has_no_more_experts_than_there_are(self) -> None:
        assert replace(SHAPE, num_experts=3, top_k=3).top_k == 3
        with refused("top_k is 4: it must lie between 1 and 3."):
            replace(SHAPE, num_experts=3)

    @pytest.mark.parametrize("name", ["hidden_size", "head_dim", "moe_intermediate_size"])
    def test_widths_are_whole_blocks(self, name: str) -> None:
        with refused(f"{name} is 40: NVFP4 needs a multiple of 16."):
            replace(SHAPE, **{name: 40})

    def test_a_dense_model_has_no_sizes_of_experts(self) -> None:
        assert RecordLayout(DENSE, (3,), (Site.K,)).site_layers(Site.K) == (3,)
        sentence = (
            "The model has experts and no MoE layer: name its MoE layers, or give 0 for "
            "num_experts, top_k and moe_intermediate_size of a dense model."
        )
        for name in ("num_experts", "top_k", "moe_intermediate_size"):
            with refused(sentence):
                replace(DENSE, **{name: 16})

    @pytest.mark.parametrize("name", ["moe_layers", "attention_layers"])
    @pytest.mark.parametrize("layers", [(1, 1), (2, 1), (-1, 2), (3, 4)])
    def test_layers_ascend_within_the_model(self, name: str, layers: tuple[int, ...]) -> None:
        with refused(f"{name} is {layers}: give ascending layers between 0 and 3."):
            replace(SHAPE, **{name: layers})

    def test_the_checks_themselves(self) -> None:
        for value in (2, 3, 4):
            check_range("n", value, 2, 4)
        check_layers("n", (), 1)
        check_layers("n", (0,), 1)
        check_layers("n", (0, 1, 5), 6)
        with refused("n is (0, 1): give ascending layers between 0 and 0."):
            check_layers("n", (0, 1), 1)

    def test_routes_alone_may_be_recorded_without_attention(self) -> None:
        assert replace(SHAPE, attention_layers=()).attention_layers == ()


QWEN3 = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


class TestFromHfConfig:
    @pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"])
    def test_every_size_is_read_from_its_entry(self, kind: str) -> None:
        shape = ModelShape.from_hf_config(QWEN3 | {"model_type": kind})
        attention = tuple(range(8)) if kind == "qwen3_moe" else (3, 7)
        assert shape == ModelShape(8, 64, 32, 16, 2, 2, 32, tuple(range(8)), attention)

    def test_an_unknown_type_is_refused_with_the_known_ones(self) -> None:
        known = "qwen3_moe, qwen3_next, qwen3_5_moe, qwen3_5_moe_text"
        for config, name in (({}, None), ({"model_type": "llama"}, "'llama'")):
            with refused(f"The model type {name} cannot be recorded: use one of {known}."):
                ModelShape.from_hf_config(config)

    @pytest.mark.parametrize("entry", sorted(set(QWEN3) - {"model_type", "num_attention_heads"}))
    def test_a_missing_entry_is_named(self, entry: str) -> None:
        config: dict[str, Any] = {k: v for k, v in QWEN3.items() if k != entry}
        if entry == "head_dim":
            assert ModelShape.from_hf_config(config).head_dim == 16
            return
        with refused(f"The model config has no entry {entry!r}: pass the complete config.json."):
            ModelShape.from_hf_config(config)

    @pytest.mark.parametrize(
        ("change", "moe"),
        [
            ({"decoder_sparse_step": 3}, (2, 5)),
            ({"decoder_sparse_step": None, "mlp_only_layers": None}, tuple(range(8))),
            ({"mlp_only_layers": [0, 7]}, tuple(range(1, 7))),
        ],
    )
    def test_which_layers_have_experts(self, change: dict[str, Any], moe: tuple[int, ...]) -> None:
        assert ModelShape.from_hf_config(QWEN3 | change).moe_layers == moe

    @pytest.mark.parametrize(
        ("change", "attention"),
        [
            ({}, (3, 7)),
            ({"full_attention_interval": None}, (3, 7)),
            ({"full_attention_interval": 3}, (2, 5)),
            ({"layer_types": ["full_attention"] + ["linear_attention"] * 7}, (0,)),
            ({"layer_types": []}, (3, 7)),
        ],
    )
    def test_which_layers_of_a_hybrid_have_a_cache(
        self, change: dict[str, Any], attention: tuple[int, ...]
    ) -> None:
        config = QWEN3 | {"model_type": "qwen3_next"} | change
        assert ModelShape.from_hf_config(config).attention_layers == attention
        everywhere = ModelShape.from_hf_config(QWEN3 | change).attention_layers
        assert everywhere == tuple(range(8))


class TestLayerNames:
    @pytest.mark.parametrize(
        ("spec", "item"), [("1,,2", ""), ("x", "x"), ("1- 2", "1- 2"), ("1-2-3", "1-2-3")]
    )
    def test_text_that_names_no_layers(self, spec: str, item: str) -> None:
        with refused(
            f"{item!r} in {spec!r} names no layers: "
            'write "deeper-half", "all" or a list such as "0,3,5-7".'
        ):
            parse_layers(spec, 8)

    @pytest.mark.parametrize("item", ["8", "7-8", "3-2"])
    def test_layers_that_there_are_not(self, item: str) -> None:
        with refused(f"{item!r} in '1,{item}' is out of range: the model has the layers 0 to 7."):
            parse_layers(f"1,{item}", 8)

    def test_ranges_have_both_ends(self) -> None:
        assert parse_layers("0-0,7-7,2-4", 8) == (0, 2, 3, 4, 7)


class TestLayout:
    @pytest.mark.parametrize("bits", [0, 5])
    def test_bits(self, bits: int) -> None:
        with refused(f"bits is {bits}: it must lie between 1 and 4."):
            replace(LAYOUT, bits=bits)

    @pytest.mark.parametrize("scale_bits", [1, 3, 4, 7, 9])
    def test_scale_bits(self, scale_bits: int) -> None:
        with refused(
            f"scale_bits is {scale_bits}: it must be one of (8, 2), all bits of an E4M3 scale or "
            "the lowest two."
        ):
            replace(LAYOUT, scale_bits=scale_bits)

    def test_layers(self) -> None:
        with refused("layers is (1, 4): give ascending layers between 0 and 3."):
            RecordLayout(SHAPE, (1, 4), (Site.FC1,))

    def test_what_is_chosen_unless_said(self) -> None:
        plain = RecordLayout(SHAPE, (1,), (Site.FC1,))
        assert (plain.bits, plain.scale_bits, plain.tensor_slice) == (1, 8, TensorSlice())

    def test_the_fields_of_a_row_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """3 layers of routes, and of the 3 captured ones 7 fields and 3 for each of 4 slots."""
        assert record_module.MAX_FIELDS == 16_384
        monkeypatch.setattr(record_module, "MAX_FIELDS", 3 + 3 * (7 + 12))
        replace(LAYOUT)
        monkeypatch.setattr(record_module, "MAX_FIELDS", 59)
        with refused("fields of a row is 60: it must lie between 0 and 59."):
            replace(LAYOUT)
        monkeypatch.setattr(record_module, "MAX_FIELDS", 3 + 3 * 7)
        LAYOUT.narrow(sites=[Site.FC1, Site.K])

    def test_the_bytes_of_a_row_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert record_module.MAX_ROW_BYTES == 16_777_216
        nbytes = LAYOUT.bytes_per_token()
        monkeypatch.setattr(record_module, "MAX_ROW_BYTES", nbytes)
        replace(LAYOUT)
        monkeypatch.setattr(record_module, "MAX_ROW_BYTES", nbytes - 1)
        with refused(f"bytes of a row is {nbytes}: it must lie between 0 and {nbytes - 1}."):
            replace(LAYOUT)

    def test_a_slice_that_divides_a_byte_of_scales(self) -> None:
        low = RecordLayout(replace(SHAPE, moe_intermediate_size=96), (1,), (Site.FC2,), 1, 2)
        with refused(
            "Values 32 to 96 of 96 at fc2 divide a byte of 2-bit block scales, which has those of "
            "64 values: record whole scales (--trace-scale-bits 8), or fetch all values."
        ):
            low.narrow(tensor_slice=TensorSlice(fc2=(32, 96)))
        with pytest.raises(LayoutError, match=r"^Values 0 to 32 of 96 at fc2 divide a byte"):
            low.narrow(tensor_slice=TensorSlice(fc2=(0, 32)))
        low.narrow(tensor_slice=TensorSlice(fc2=(64, 96)))
        low.narrow(tensor_slice=TensorSlice(fc2=(0, 64)))

    def test_low_bits_are_no_scale(self) -> None:
        low = RecordLayout(SHAPE, (1,), (Site.FC1,), scale_bits=2)
        rows = torch.zeros(1, low.row_bytes(Part.FORWARD), dtype=torch.uint8)
        with refused(
            "The record holds 2 bits of a block scale: read them next to the trainer's own with "
            "bridge.fp4.scale_bits, or capture with --trace-scale-bits 8."
        ):
            low.site(rows, Site.FC1, 1).effective_scale()

    def test_a_site_that_is_not_held(self) -> None:
        with refused(
            "The record holds no k of layer 2: capture it in the rollout or ask for the layers "
            "(1, 3)."
        ):
            LAYOUT.columns(Site.K, 2)

    def test_asking_for_more_than_there_is(self) -> None:
        small = RecordLayout(SHAPE, (1,), (Site.FC1, Site.K))
        for layers, sites, named in (
            ((1, 2), None, "(1, 2) and sites fc1, k"),
            (None, ["k", "v"], "(1,) and sites k, v"),
        ):
            with refused(
                f"Layers {named} were asked for, but the record holds layers (1,) and sites fc1, k."
            ):
                small.narrow(layers, sites)

    def test_narrowing_sorts_and_takes_names(self) -> None:
        kept = LAYOUT.narrow([3, 1, 3], ["k", "fc1"])
        assert (kept.layers, kept.sites) == ((1, 3), (Site.FC1, Site.K))
        assert (kept.bits, kept.scale_bits) == (3, 8)
        assert LAYOUT.narrow() == LAYOUT

    def test_expert_ids_take_one_byte_up_to_256_experts(self) -> None:
        sizes = [RecordLayout(replace(SHAPE, num_experts=n), (), ()).id_bytes for n in (256, 257)]
        assert sizes == [1, 2]

    def test_rows_of_another_form(self) -> None:
        width = LAYOUT.row_bytes(Part.FORWARD)
        for rows in (
            torch.zeros(2, width - 1, dtype=torch.uint8),
            torch.zeros(2, width, dtype=torch.int8),
            torch.zeros(width, dtype=torch.uint8),
        ):
            with pytest.raises(LayoutError, match="pass uint8"):
                LAYOUT.site(rows, Site.FC1, 1)
            with pytest.raises(LayoutError, match="pass uint8"):
                LAYOUT.routes(rows)


class TestPlainValues:
    @pytest.mark.parametrize("value", [[1] * 513, [0, 1.0], [True], "1", True, (1,), None])
    def test_what_is_neither_a_number_nor_a_short_list(self, value: Any) -> None:
        with refused(
            f"The record layout is not valid ({value!r:.60} is neither an integer nor a short list "
            "of integers): run the same release of sglang-trace on both sides.",
            SchemaMismatch,
        ):
            RecordLayout.from_dict(LAYOUT.to_dict() | {"layers": value})

    def test_lists_of_as_many_layers_as_models_may_have(self) -> None:
        shape = ModelShape(512, 16, 16, 4, 1, 1, 16, tuple(range(512)), ())
        layout = RecordLayout(shape, tuple(range(512)), (Site.FC1,))
        assert RecordLayout.from_dict(layout.to_dict()) == layout


class TestSlices:
    @pytest.mark.parametrize(
        ("bounds", "name", "size", "multiple"),
        [
            ({"fc2": (0, 48)}, "fc2 is 0 to 48", 32, 16),
            ({"fc2": (8, 32)}, "fc2 is 8 to 32", 32, 16),
            ({"fc2": (0, 24)}, "fc2 is 0 to 24", 32, 16),
            ({"fc2": (16, 16)}, "fc2 is 16 to 16", 32, 16),
            ({"fc2": (-16, 16)}, "fc2 is -16 to 16", 32, 16),
            ({"heads": (1, 3)}, "heads is 1 to 3", 2, 1),
            ({"heads": (1, 1)}, "heads is 1 to 1", 2, 1),
            ({"heads": (-1, 1)}, "heads is -1 to 1", 2, 1),
        ],
    )
    def test_a_slice_is_a_part_of_the_model(
        self, bounds: dict[str, Any], name: str, size: int, multiple: int
    ) -> None:
        with refused(f"{name}: give a part of 0 to {size} in multiples of {multiple}."):
            TensorSlice(**bounds).check(SHAPE)

    def test_which_values_are_held(self) -> None:
        part = TensorSlice((16, 32), (1, 2))
        part.check(SHAPE)
        assert part.values(Site.FC1, SHAPE) == range(64)
        assert part.values(Site.FC2, SHAPE) == range(16, 32)
        assert part.values(Site.K, SHAPE) == part.values(Site.V, SHAPE) == range(16, 32)
        assert TensorSlice().values(Site.FC2, SHAPE) == range(32)
        assert TensorSlice().values(Site.K, SHAPE) == range(32)

    def test_what_is_left_open_is_the_outers(self) -> None:
        outer = TensorSlice((0, 16), (0, 1))
        assert TensorSlice().within(outer) == outer
        assert outer.within(TensorSlice()) == outer
        assert outer.within(outer) == outer

    @pytest.mark.parametrize(
        ("inner", "asked", "held"),
        [
            (TensorSlice(fc2=(0, 32)), "fc2 0 to 32", "16 to 32"),
            (TensorSlice(fc2=(16, 48)), "fc2 16 to 48", "16 to 32"),
            (TensorSlice(fc2=(32, 16)), "fc2 32 to 16", "16 to 32"),
            (TensorSlice(heads=(0, 2)), "heads 0 to 2", "1 to 2"),
        ],
    )
    def test_more_than_the_outer_has_is_refused(
        self, inner: TensorSlice, asked: str, held: str
    ) -> None:
        with refused(f"{asked} were asked for, but the record holds {held}."):
            inner.within(TensorSlice((16, 32), (1, 2)))

    def test_what_describes_no_slice(self) -> None:
        assert TensorSlice.from_dict({}) == TensorSlice()
        assert TensorSlice.from_dict({"fc2": [0, 16], "heads": None}) == TensorSlice((0, 16))
        assert TensorSlice.from_dict({"heads": [1, 2]}) == TensorSlice(None, (1, 2))
        with refused("[1] is not a slice", TypeError):
            TensorSlice.from_dict([1])
        for value in ([0, 1.0], [False, 1], ["0", 1]):
            with refused(f"{value!r} is not a pair of integers", TypeError):
                TensorSlice.from_dict({"fc2": value})
        for value in ([1], [1, 2, 3]):
            with pytest.raises(ValueError, match="values to unpack"):
                TensorSlice.from_dict({"fc2": value})


class TestSelection:
    @pytest.mark.parametrize(
        ("columns", "slices"),
        [
            ([], ()),
            ([4], (slice(4, 5),)),
            ([0, 1, 2], (slice(0, 3),)),
            ([0, 2, 3, 7], (slice(0, 1), slice(2, 4), slice(7, 8))),
        ],
    )
    def test_columns_as_runs_of_neighbours(
        self, columns: list[int], slices: tuple[slice, ...]
    ) -> None:
        assert as_slices(np.array(columns, np.int64)) == slices

    def test_a_slice_of_a_slice_is_counted_from_the_outer_one(self) -> None:
        shape = replace(SHAPE, moe_intermediate_size=64)
        outer = RecordLayout(shape, (1,), (Site.FC2,), tensor_slice=TensorSlice((16, 64)))
        inner = outer.narrow(tensor_slice=TensorSlice((32, 48)))
        # 48 values a slot: 6 bytes of codes, 3 scales, the token's scale.
        first = [2, 3, 7, 9, 10, 11, 12]
        assert byte_columns(outer, inner, Part.FORWARD).tolist() == [
            13 * slot + column for slot in range(4) for column in first
        ]
        assert selection(outer, inner, Part.FORWARD)[:3] == (
            slice(2, 4),
            slice(7, 8),
            slice(9, 13),
        )
