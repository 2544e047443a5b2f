"""Rows of a small model byte by byte, derived by hand; stores and peers have these bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import bridge.layout
from bridge.layout import Field, Kind, ModelShape, Part, RecordLayout, Shard, Site, TensorSlice
from bridge.layout.columns import byte_columns
from bridge.layout.site import SiteRecord

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=16,
    moe_intermediate_size=16,
    num_experts=4,
    top_k=2,
    num_kv_heads=1,
    head_dim=16,
    moe_layers=(0, 1),
    attention_layers=(0, 1),
)
LAYOUT = RecordLayout(SHAPE, (1,), tuple(Site), bits=2)
EVERY_CODE = torch.arange(16, dtype=torch.uint8)


def u8(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def written(layout: RecordLayout) -> dict[Part, bytes]:
    """One row of each part of known activations."""
    forward = torch.full((1, layout.row_bytes(Part.FORWARD)), 0xAA, dtype=torch.uint8)
    kv = torch.full((1, layout.row_bytes(Part.KV)), 0xAA, dtype=torch.uint8)
    layout.write_routes(forward, 0, torch.tensor([[3, 1]]))
    layout.write_routes(forward, 1, torch.tensor([[0, 2]]))
    fc2_codes = torch.stack([u8(*[1] * 16), u8(*[2] * 16)])[None]
    fc2_scale = torch.tensor([[[2.0], [0.5]]])
    layout.write_site(forward, Site.FC1, 1, EVERY_CODE[None], u8([0x38]), torch.tensor([[1.0]]))
    layout.write_site(forward, Site.FC2, 1, fc2_codes, u8([[0x40], [0x41]]), fc2_scale)
    layout.write_site(kv, Site.K, 1, EVERY_CODE.flip(0)[None], u8([0x7E]))
    layout.write_site(kv, Site.V, 1, u8([4] * 8 + [3] * 8), u8([0x01]))
    return {Part.FORWARD: bytes(forward[0].tolist()), Part.KV: bytes(kv[0].tolist())}


@pytest.mark.parametrize(
    ("bits", "fc1", "slots", "k", "v"),
    [
        (1, "aaaa", ("ffff", "0000"), "5555", "00ff"),
        (2, "aaaacccc", ("ffff0000", "0000ffff"), "55553333", "00ff00ff"),
        (
            4,
            "aaaaccccf0f000ff",
            ("ffff000000000000", "0000ffff00000000"),
            "555533330f0fff00",
            "00ff00ffff000000",
        ),
    ],
)
def test_known_rows(bits: int, fc1: str, slots: tuple[str, str], k: str, v: str) -> None:
    rows = written(replace(LAYOUT, bits=bits))
    routes, tokens = "0301" + "0002", ("0000803f", "00000040", "0000003f")
    forward = routes + fc1 + "38" + tokens[0]
    forward += slots[0] + "40" + tokens[1] + slots[1] + "41" + tokens[2]
    assert rows[Part.FORWARD].hex() == forward
    assert rows[Part.KV].hex() == k + "7e" + v + "01"


def test_known_row_of_low_scales() -> None:
    """Two bits of a scale in a byte of its own, as there is one block a site: 0x41 -> 1."""
    rows = written(replace(LAYOUT, bits=1, scale_bits=2))
    assert rows[Part.FORWARD].hex() == (
        "03010002" + "aaaa" + "00" + "0000803f" + "ffff" + "00" + "000000400000" + "01" + "0000003f"
    )
    assert rows[Part.KV].hex() == "5555" + "02" + "00ff" + "01"


def test_known_expert_ids_of_two_bytes() -> None:
    layout = RecordLayout(replace(SHAPE, num_experts=65_536), (), (Site.ROUTES,))
    row = torch.zeros(1, layout.row_bytes(Part.FORWARD), dtype=torch.uint8)
    layout.write_routes(row, 0, torch.tensor([[0x0102, 0xFFFE]]))
    layout.write_routes(row, 1, torch.tensor([[0x0003, 0x8000]]))
    assert bytes(row[0].tolist()).hex() == "0201" + "feff" + "0300" + "0080"
    assert layout.routes(row).tolist() == [[[0x0102, 0xFFFE], [0x0003, 0x8000]]]


def test_known_places_of_fields() -> None:
    codes, scales, token = Kind.CODES, Kind.SCALES, Kind.TOKEN_SCALE
    assert LAYOUT.fields(Part.FORWARD) == (
        Field(Site.ROUTES, 0, None, Kind.ROUTES, 0, 2),
        Field(Site.ROUTES, 1, None, Kind.ROUTES, 2, 2),
        Field(Site.FC1, 1, None, codes, 4, 4),
        Field(Site.FC1, 1, None, scales, 8, 1),
        Field(Site.FC1, 1, None, token, 9, 4),
        Field(Site.FC2, 1, 0, codes, 13, 4),
        Field(Site.FC2, 1, 0, scales, 17, 1),
        Field(Site.FC2, 1, 0, token, 18, 4),
        Field(Site.FC2, 1, 1, codes, 22, 4),
        Field(Site.FC2, 1, 1, scales, 26, 1),
        Field(Site.FC2, 1, 1, token, 27, 4),
    )
    assert LAYOUT.fields(Part.KV) == (
        Field(Site.K, 1, None, codes, 0, 4),
        Field(Site.K, 1, None, scales, 4, 1),
        Field(Site.V, 1, None, codes, 5, 4),
        Field(Site.V, 1, None, scales, 9, 1),
    )
    assert (LAYOUT.row_bytes(Part.FORWARD), LAYOUT.row_bytes(Part.KV)) == (31, 10)
    assert LAYOUT.bytes_per_token() == 41
    assert LAYOUT.breakdown() == {
        Site.FC1: {codes: 4, scales: 1, token: 4},
        Site.FC2: {codes: 8, scales: 2, token: 8},
        Site.K: {codes: 4, scales: 1},
        Site.V: {codes: 4, scales: 1},
        Site.ROUTES: {Kind.ROUTES: 4},
    }


def test_known_columns_and_layers() -> None:
    assert LAYOUT.columns(Site.ROUTES, 0) == slice(0, 2)
    assert LAYOUT.columns(Site.FC1, 1) == slice(4, 13)
    assert LAYOUT.columns(Site.FC2, 1) == slice(13, 31)
    assert LAYOUT.columns(Site.V, 1) == slice(5, 10)
    assert LAYOUT.site_layers(Site.ROUTES) == (0, 1)
    assert LAYOUT.site_layers(Site.K) == (1,)
    assert LAYOUT.layers_of(Site.ROUTES, Site.K) == (0, 1)
    assert LAYOUT.layers_of(Site.K, Site.V) == (1,)
    assert LAYOUT.layers_of() == ()


def test_a_known_row_is_read_back() -> None:
    row = u8(list(bytes.fromhex("0301" + "0002" + "aaaacccc" + "38" + "0000803f") + bytes(18)))
    record = LAYOUT.site(row, Site.FC1, 1)
    assert record.low_codes().tolist() == [[0, 1, 2, 3] * 4]
    assert record.low_scales().tolist() == [[0]]
    assert record.effective_scale().tolist() == [[1.0]]
    assert (record.width, record.bits, record.scale_bits) == (16, 2, 8)
    assert LAYOUT.routes(row).tolist() == [[[3, 1], [0, 2]]]


def test_a_scale_of_k_or_v_is_the_layers() -> None:
    record = SiteRecord(u8([0, 0]), u8([0x40]), None, bits=1, scale_bits=8)
    assert record.effective_scale().tolist() == [[2.0]]
    assert record.effective_scale(0.25).tolist() == [[0.5]]


def test_the_wire_form_is_known() -> None:
    assert LAYOUT.to_dict() == {
        "shape": {
            "num_layers": 2,
            "hidden_size": 16,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "top_k": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "moe_layers": [0, 1],
            "attention_layers": [0, 1],
        },
        "layers": [1],
        "sites": ["fc1", "fc2", "k", "v", "routes"],
        "bits": 2,
        "scale_bits": 8,
        "tensor_slice": {"fc2": None, "heads": None},
    }
    assert [str(name) for name in (*Site, *Part, *Kind)] == [
        *("fc1", "fc2", "k", "v", "routes"),
        *("forward", "kv"),
        *("codes", "scales", "token_scale", "routes"),
    ]
    assert TensorSlice((0, 16), (1, 2)).to_dict() == {"fc2": [0, 16], "heads": [1, 2]}
    assert Shard(LAYOUT, by_slot=True).to_dict() == {
        "layers": [1],
        "sites": ["fc1", "fc2", "k", "v", "routes"],
        "tensor_slice": {"fc2": None, "heads": None},
        "by_slot": True,
    }


def test_known_columns_of_a_slice() -> None:
    """Of 64 values the second 16: bytes 2 and 3 of every plane of 8, and the second scale."""
    shape = replace(SHAPE, moe_intermediate_size=64, num_kv_heads=4)
    full = RecordLayout(shape, (0,), (Site.FC2, Site.K), bits=2)
    kept = full.narrow(tensor_slice=TensorSlice(fc2=(16, 32), heads=(1, 2)))
    assert byte_columns(full, kept, Part.KV).tolist() == [2, 3, 10, 11, 17]
    first_slot = [2, 3, 10, 11, 17, 20, 21, 22, 23]
    assert byte_columns(full, kept, Part.FORWARD).tolist() == [
        *first_slot,
        *(24 + column for column in first_slot),
    ]


def test_everything_that_the_package_exports_is_there() -> None:
    names = bridge.layout.__all__
    assert len(names) == len(set(names)) == 11
    for name in names:
        assert getattr(bridge.layout, name).__name__ == name
