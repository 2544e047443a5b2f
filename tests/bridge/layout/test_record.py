"""What a row looks like and costs; the paper's byte counts for Qwen3.5-35B-A3B."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge.cli.size_table import PUBLISHED
from bridge.errors import LayoutError, SchemaMismatch
from bridge.fp4.nvfp4 import decode_e4m3, quantize_nvfp4, token_scale
from bridge.layout import (
    Kind,
    ModelShape,
    Part,
    RecordLayout,
    Site,
    TensorSlice,
    deeper_half,
    parse_layers,
)
from bridge.layout.columns import selection

FC1, FC2, K, V, ROUTES = Site
FORWARD, KV = Part

QWEN_35B = PUBLISHED["Qwen3.5-35B-A3B"]
SMALL = ModelShape(
    num_layers=4,
    hidden_size=64,
    moe_intermediate_size=32,
    num_experts=16,
    top_k=2,
    num_kv_heads=2,
    head_dim=16,
    moe_layers=(1, 2, 3),
    attention_layers=(0, 1, 3),
)
ALL_SITES = RecordLayout(SMALL, (1, 2, 3), tuple(Site), bits=3)


def total(layout: RecordLayout, sites: tuple[Site, ...], kinds: tuple[Kind, ...]) -> int:
    table = layout.breakdown()
    return sum(table[site].get(kind, 0) for site in sites for kind in kinds)


class TestBytesOfThePaper:
    """Derived counts: 45 KiB, 5.625 KiB and 8.44 KiB a token, codes and block scales alone."""

    CODES_AND_SCALES = (Kind.CODES, Kind.SCALES)

    def test_full_codes_of_all_layers(self) -> None:
        layout = RecordLayout(QWEN_35B, tuple(range(40)), (FC1, K, V), bits=4)
        assert total(layout, (FC1,), self.CODES_AND_SCALES) == 46_080
        assert total(layout, (K, V), self.CODES_AND_SCALES) == 5_760

    def test_one_bit_of_the_deeper_half(self) -> None:
        layout = RecordLayout(QWEN_35B, deeper_half(40), (FC1, K, V), bits=1)
        assert layout.site_layers(K) == (23, 27, 31, 35, 39)
        assert total(layout, (FC1,), self.CODES_AND_SCALES) == 7_680
        assert total(layout, (K, V), self.CODES_AND_SCALES) == 960

    def test_what_our_default_really_costs(self) -> None:
        layout = RecordLayout(QWEN_35B, deeper_half(40), (FC1, K, V, ROUTES), bits=1)
        assert total(layout, (FC1,), (Kind.TOKEN_SCALE,)) == 20 * 4
        assert total(layout, (ROUTES,), (Kind.ROUTES,)) == 40 * 8
        assert layout.bytes_per_token() == 7_680 + 960 + 80 + 320

    def test_two_bits_of_the_scales_are_a_quarter_of_their_bytes(self) -> None:
        layout = RecordLayout(QWEN_35B, deeper_half(40), (FC1, K, V), bits=1, scale_bits=2)
        assert total(layout, (FC1,), (Kind.SCALES,)) == 20 * 128 // 4
        assert total(layout, (K, V), (Kind.SCALES,)) == 5 * 64 // 4

    def test_what_full_codes_with_fc2_cost(self) -> None:
        layout = RecordLayout(QWEN_35B, tuple(range(40)), (FC2,), bits=4)
        assert layout.bytes_per_token() == 40 * 8 * (512 // 2 + 512 // 16 + 4)


class TestFields:
    @pytest.mark.parametrize("part", Part)
    def test_fields_follow_each_other_without_gaps(self, part: Part) -> None:
        end = 0
        for field in ALL_SITES.fields(part):
            assert field.offset == end
            end += field.nbytes
        assert end == ALL_SITES.row_bytes(part) > 0

    def test_the_forward_order_is_routes_then_layer_by_layer_fc1_and_fc2_slots(self) -> None:
        order = list(dict.fromkeys((f.site, f.layer, f.slot) for f in ALL_SITES.fields(FORWARD)))
        routes = [(ROUTES, layer, None) for layer in (1, 2, 3)]
        places = [(FC1, None), (FC2, 0), (FC2, 1)]
        assert order == routes + [(site, n, slot) for n in (1, 2, 3) for site, slot in places]

    def test_the_kv_order_is_k_then_v_of_each_captured_attention_layer(self) -> None:
        order = list(dict.fromkeys((f.site, f.layer) for f in ALL_SITES.fields(KV)))
        assert order == [(K, 1), (V, 1), (K, 3), (V, 3)]

    def test_a_quantized_site_is_codes_scales_and_the_tokens_scale_outside_kv(self) -> None:
        fc1 = [(f.kind, f.nbytes) for f in ALL_SITES.fields(FORWARD) if f.site is FC1][:3]
        assert fc1 == [(Kind.CODES, 24), (Kind.SCALES, 4), (Kind.TOKEN_SCALE, 4)]
        k = [(f.kind, f.nbytes) for f in ALL_SITES.fields(KV) if f.site is K][:2]
        assert k == [(Kind.CODES, 12), (Kind.SCALES, 2)]

    def test_routes_are_recorded_for_every_moe_layer_whatever_is_captured(self) -> None:
        assert RecordLayout(SMALL, (3,), (ROUTES,)).site_layers(ROUTES) == (1, 2, 3)

    def test_the_breakdown_sums_to_the_bytes_per_token(self) -> None:
        table = ALL_SITES.breakdown()
        assert sum(sum(kinds.values()) for kinds in table.values()) == ALL_SITES.bytes_per_token()

    @pytest.mark.parametrize(("experts", "nbytes"), [(256, 2), (257, 4)])
    def test_expert_ids_take_two_bytes_above_256_experts(self, experts: int, nbytes: int) -> None:
        layout = RecordLayout(replace(SMALL, num_experts=experts), (), (ROUTES,))
        assert {field.nbytes for field in layout.fields(FORWARD)} == {nbytes}

    def test_a_site_that_is_not_held_is_named(self) -> None:
        with pytest.raises(LayoutError, match="no k of layer 2"):
            ALL_SITES.columns(K, 2)


def quantized(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    tensor = quantize_nvfp4(x, token_scale(x))
    return tensor.codes_u8, tensor.scales_u8, tensor.global_scale


class TestRows:
    T = 5

    def rows(self, part: Part, layout: RecordLayout = ALL_SITES) -> torch.Tensor:
        return torch.full((self.T, layout.row_bytes(part)), 0xAA, dtype=torch.uint8)

    @pytest.mark.parametrize("scale_bits", [8, 2])
    @pytest.mark.parametrize("site", [FC1, FC2, K, V])
    def test_the_low_bits_of_the_scales_are_read_back_from_either_width(
        self, scale_bits: int, site: Site
    ) -> None:
        layout = replace(ALL_SITES, scale_bits=scale_bits)
        part = FORWARD if site in (FC1, FC2) else KV
        shape = {FC1: (5, 64), FC2: (5, 2, 32), K: (5, 32), V: (5, 32)}[site]
        codes, scales, scale = quantized(*shape)
        rows = self.rows(part, layout)
        layout.write_site(rows, site, 3, codes, scales, scale if part is FORWARD else None)
        record = layout.site(rows, site, 3)
        assert record.width == shape[-1]
        assert torch.equal(record.low_codes(), codes & 7)
        assert torch.equal(record.low_scales(), scales & 3)
        if part is FORWARD:
            assert record.token_scale is not None
            assert torch.equal(record.token_scale, scale)

    def test_low_bits_alone_are_no_scale(self) -> None:
        layout = replace(ALL_SITES, scale_bits=2)
        record = layout.site(self.rows(FORWARD, layout), FC1, 3)
        with pytest.raises(LayoutError, match="--trace-scale-bits 8"):
            record.effective_scale()

    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    @pytest.mark.parametrize(
        ("site", "shape"), [(FC1, (5, 64)), (FC2, (5, 2, 32)), (K, (5, 32)), (V, (5, 32))]
    )
    def test_what_is_written_is_read_back(
        self, bits: int, site: Site, shape: tuple[int, ...]
    ) -> None:
        layout = replace(ALL_SITES, bits=bits)
        part = FORWARD if site in (FC1, FC2) else KV
        codes, scales, scale = quantized(*shape)
        rows = self.rows(part, layout)
        layout.write_site(rows, site, 3, codes, scales, scale if part is FORWARD else None)
        record = layout.site(rows, site, 3)
        assert torch.equal(record.low_codes(), codes & (1 << bits) - 1)
        assert torch.equal(record.scales_u8, scales)
        if part is FORWARD:
            assert record.token_scale is not None
            assert torch.equal(record.token_scale, scale)
            assert torch.equal(record.effective_scale(), decode_e4m3(scales) * scale)
        else:
            assert record.token_scale is None
            assert torch.equal(record.effective_scale(0.5), decode_e4m3(scales) * 0.5)

    def test_writing_a_site_touches_its_columns_only(self) -> None:
        rows = self.rows(FORWARD)
        ALL_SITES.write_site(rows, FC2, 2, *quantized(5, 2, 32))
        columns = ALL_SITES.columns(FC2, 2)
        outside = torch.cat((rows[:, : columns.start], rows[:, columns.stop :]), dim=1)
        assert (outside == 0xAA).all()
        assert (rows[:, columns] != 0xAA).any()

    def test_fields_say_where_the_bytes_went(self) -> None:
        codes, scales, scale = quantized(5, 2, 32)
        rows = self.rows(FORWARD)
        ALL_SITES.write_site(rows, FC2, 2, codes, scales, scale)
        for field in ALL_SITES.fields(FORWARD):
            if (field.site, field.layer, field.kind) == (FC2, 2, Kind.SCALES):
                stored = rows[:, field.offset : field.offset + field.nbytes]
                assert torch.equal(stored, scales[:, field.slot])

    @pytest.mark.parametrize("experts", [16, 300, 65_536])
    def test_routes_keep_the_engines_order(self, experts: int) -> None:
        shape = replace(SMALL, num_experts=experts)
        layout = RecordLayout(shape, (3,), (ROUTES, FC1))
        ids = torch.randint(0, experts, (self.T, 3, 2), generator=torch.Generator().manual_seed(0))
        ids[0, 0] = torch.tensor([experts - 1, 0])
        rows = self.rows(FORWARD, layout)
        for index, layer in enumerate(shape.moe_layers):
            layout.write_routes(rows, layer, ids[:, index].to(torch.int32))
        assert torch.equal(layout.routes(rows), ids)

    @pytest.mark.parametrize("t", [0, 1])
    def test_no_row_and_a_single_row_work(self, t: int) -> None:
        rows = torch.zeros(t, ALL_SITES.row_bytes(FORWARD), dtype=torch.uint8)
        ALL_SITES.write_site(rows, FC1, 1, *(piece[:t] for piece in quantized(5, 64)))
        assert ALL_SITES.site(rows, FC1, 1).low_codes().shape == (t, 64)
        assert ALL_SITES.site(rows, FC1, 1).effective_scale().shape == (t, 4)
        assert ALL_SITES.routes(rows).shape == (t, 3, 2)

    @pytest.mark.parametrize("part", Part)
    def test_split_gives_every_quantized_site_of_the_part(self, part: Part) -> None:
        sites = (FC1, FC2) if part is FORWARD else (K, V)
        split = ALL_SITES.split(part, self.rows(part))
        assert set(split) == {(s, n) for s in sites for n in ALL_SITES.site_layers(s)}

    def test_rows_of_another_width_or_dtype_are_refused(self) -> None:
        rows = self.rows(FORWARD)
        for wrong in (rows[:, :-1], rows.to(torch.int32), self.rows(KV)):
            with pytest.raises(LayoutError, match="pass uint8"):
                ALL_SITES.site(wrong, FC1, 1)


class TestNarrowing:
    @pytest.mark.parametrize("layers", [None, (), (2,), (1, 3)])
    @pytest.mark.parametrize("sites", [None, (FC1,), (FC2, V), (ROUTES, K), ()])
    @pytest.mark.parametrize("part", Part)
    def test_the_selected_columns_are_a_row_of_the_narrowed_layout(
        self, layers: tuple[int, ...] | None, sites: tuple[Site, ...] | None, part: Part
    ) -> None:
        narrowed = ALL_SITES.narrow(layers, sites)
        row = torch.arange(ALL_SITES.row_bytes(part)).to(torch.int64)
        selected = [row[columns] for columns in selection(ALL_SITES, narrowed, part)]
        picked = torch.cat([*selected, row[:0]])
        assert len(picked) == narrowed.row_bytes(part)
        for field in narrowed.fields(part):
            whole = ALL_SITES.columns(field.site, field.layer)
            columns = narrowed.columns(field.site, field.layer)
            assert torch.equal(picked[columns], row[whole])

    @pytest.mark.parametrize("scale_bits", [8, 2])
    def test_a_narrowed_record_keeps_its_bits(self, scale_bits: int) -> None:
        narrowed = replace(ALL_SITES, scale_bits=scale_bits).narrow((1,), (FC1,))
        assert (narrowed.bits, narrowed.scale_bits) == (3, scale_bits)

    def test_neighbouring_columns_are_selected_in_one_slice(self) -> None:
        everything = slice(0, ALL_SITES.row_bytes(FORWARD))
        assert selection(ALL_SITES, ALL_SITES, FORWARD) == (everything,)

    def test_a_slice_of_low_scales_has_whole_bytes_of_them(self) -> None:
        """A byte has the scales of 64 values, here of four heads."""
        shape = replace(SMALL, num_kv_heads=9, moe_intermediate_size=96)
        low = RecordLayout(shape, (1, 3), tuple(Site), scale_bits=2)
        kept = low.narrow(tensor_slice=TensorSlice(fc2=(64, 96), heads=(4, 9)))
        assert kept.values(K) == range(64, 144)
        for fc2, heads in (((0, 32), None), ((32, 96), None), (None, (2, 4)), (None, (0, 2))):
            with pytest.raises(LayoutError, match="--trace-scale-bits 8"):
                low.narrow(tensor_slice=TensorSlice(fc2, heads))
            # What is not recorded is not divided.
            low.narrow(sites=(FC1, ROUTES), tensor_slice=TensorSlice(fc2, heads))

    @pytest.mark.parametrize(("layers", "sites"), [((0,), None), (None, (FC1,))])
    def test_asking_for_what_is_not_held_is_refused(
        self, layers: tuple[int, ...] | None, sites: tuple[Site, ...] | None
    ) -> None:
        layout = RecordLayout(SMALL, (1,), (K,))
        with pytest.raises(LayoutError, match="record holds layers"):
            layout.narrow(layers, sites)


class TestWireForm:
    def test_it_survives_the_round_trip(self) -> None:
        assert RecordLayout.from_dict(ALL_SITES.to_dict()) == ALL_SITES
        low_scales = replace(ALL_SITES, scale_bits=2)
        assert RecordLayout.from_dict(low_scales.to_dict()) == low_scales != ALL_SITES

    def test_it_is_made_of_plain_values(self) -> None:
        data = ALL_SITES.to_dict()
        assert type(data["sites"][0]) is str
        assert type(data["shape"]["moe_layers"]) is list

    def test_equal_choices_are_equal_layouts(self) -> None:
        assert RecordLayout(SMALL, (1,), (V, FC1)) == RecordLayout(SMALL, (1,), (FC1, V))

    @pytest.mark.parametrize(
        "change",
        [
            {"bits": 0},
            {"bits": 5},
            {"bits": True},
            {"bits": "1"},
            {"scale_bits": 4},
            {"scale_bits": 0},
            {"scale_bits": "2"},
            {"scale_bits": [2]},
            {"layers": [3, 1]},
            {"layers": [1, 1]},
            {"layers": [4]},
            {"layers": [-1]},
            {"layers": [[1]]},
            {"layers": [1.5]},
            {"layers": [True]},
            {"layers": 1},
            {"layers": None},
            {"layers": list(range(1000))},
            {"sites": ["fc3"]},
            {"sites": None},
            {"shape": None},
            {"shape": {}},
        ],
        ids=str,
    )
    def test_a_bad_description_is_a_schema_mismatch(self, change: dict[str, Any]) -> None:
        with pytest.raises(SchemaMismatch, match="same release"):
            RecordLayout.from_dict(ALL_SITES.to_dict() | change)

    @pytest.mark.parametrize("entry", ALL_SITES.to_dict())
    def test_a_missing_entry_is_a_schema_mismatch(self, entry: str) -> None:
        data = ALL_SITES.to_dict()
        del data[entry]
        with pytest.raises(SchemaMismatch):
            RecordLayout.from_dict(data)

    @pytest.mark.parametrize(
        ("entry", "value"),
        [
            ("num_layers", 1 << 40),
            ("hidden_size", 72),
            ("hidden_size", 1 << 40),
            ("head_dim", 0),
            ("top_k", 17),
            ("num_experts", 1 << 20),
            ("num_kv_heads", 1.5),
            ("moe_layers", []),
            ("moe_layers", [9]),
            ("attention_layers", [2, 1]),
        ],
    )
    def test_an_impossible_shape_is_a_schema_mismatch(self, entry: str, value: object) -> None:
        data = ALL_SITES.to_dict()
        data["shape"][entry] = value
        with pytest.raises(SchemaMismatch):
            RecordLayout.from_dict(data)

    def test_a_row_beyond_the_bound_is_a_schema_mismatch(self) -> None:
        data = ALL_SITES.to_dict() | {"bits": 4}
        data["shape"] |= {"hidden_size": 1 << 20, "moe_intermediate_size": 1 << 20, "top_k": 16}
        data["shape"] |= {"num_layers": 40, "moe_layers": list(range(40))}
        data["layers"] = list(range(40))
        with pytest.raises(SchemaMismatch, match="bytes of a row"):
            RecordLayout.from_dict(data)


class TestLayerChoice:
    @pytest.mark.parametrize(
        ("num_layers", "layers"),
        [(1, (0,)), (4, (2, 3)), (5, (2, 3, 4)), (40, tuple(range(20, 40)))],
    )
    def test_the_deeper_half(self, num_layers: int, layers: tuple[int, ...]) -> None:
        assert deeper_half(num_layers) == layers
        assert parse_layers("deeper-half", num_layers) == layers

    @pytest.mark.parametrize(
        ("spec", "layers"),
        [
            ("all", tuple(range(8))),
            ("0,3,5-7", (0, 3, 5, 6, 7)),
            ("7, 2", (2, 7)),
            ("1-2,2-3", (1, 2, 3)),
        ],
    )
    def test_lists_and_ranges(self, spec: str, layers: tuple[int, ...]) -> None:
        assert parse_layers(spec, 8) == layers

    @pytest.mark.parametrize("spec", ["", "half", "1,,2", "-1", "1-", "a-b", "1-2-3", "½"])
    def test_other_text_is_refused_with_the_forms_that_work(self, spec: str) -> None:
        with pytest.raises(LayoutError, match="deeper-half"):
            parse_layers(spec, 8)

    @pytest.mark.parametrize("spec", ["8", "5-8", "6-5"])
    def test_layers_that_the_model_lacks_are_refused(self, spec: str) -> None:
        with pytest.raises(LayoutError, match="0 to 7"):
            parse_layers(spec, 8)


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


class TestFromHfConfig:
    def test_qwen3_moe_has_experts_and_attention_everywhere(self) -> None:
        shape = ModelShape.from_hf_config(QWEN3_MOE)
        assert shape == ModelShape(6, 64, 32, 16, 2, 2, 32, tuple(range(6)), tuple(range(6)))

    def test_dense_layers_are_left_out(self) -> None:
        config = QWEN3_MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 2}
        assert ModelShape.from_hf_config(config).moe_layers == (3, 5)

    def test_the_head_dim_defaults_to_the_hidden_size_over_the_heads(self) -> None:
        config = {k: v for k, v in QWEN3_MOE.items() if k != "head_dim"}
        assert ModelShape.from_hf_config(config).head_dim == 16

    def test_hybrids_have_a_kv_cache_in_full_attention_layers_only(self) -> None:
        hybrid = QWEN3_MOE | {"model_type": "qwen3_next"}
        assert ModelShape.from_hf_config(hybrid).attention_layers == (3,)
        every_second = hybrid | {"full_attention_interval": 2}
        assert ModelShape.from_hf_config(every_second).attention_layers == (1, 3, 5)

    def test_layer_types_and_a_nested_text_config_are_read(self) -> None:
        types = ["full_attention", *["linear_attention"] * 4, "full_attention"]
        text = QWEN3_MOE | {"model_type": "qwen3_5_moe_text", "layer_types": types}
        shape = ModelShape.from_hf_config({"model_type": "qwen3_5_moe", "text_config": text})
        assert shape.attention_layers == (0, 5)

    def test_another_model_type_is_refused_with_those_that_work(self) -> None:
        with pytest.raises(LayoutError, match="qwen3_moe"):
            ModelShape.from_hf_config(QWEN3_MOE | {"model_type": "llama"})

    def test_an_incomplete_config_names_what_it_lacks(self) -> None:
        config = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"}
        with pytest.raises(LayoutError, match="num_experts"):
            ModelShape.from_hf_config(config)
