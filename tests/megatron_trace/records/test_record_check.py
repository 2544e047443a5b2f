"""Rows that no rollout writes are refused when the micro-batch is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_rollout import SHAPE, Weights
from torch import Tensor

from bridge.client.records import TrajectoryRecords
from bridge.layout import RecordLayout, Site
from bridge.layout.site import PART_OF, Part

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(6, 4)


@pytest.fixture(scope="module")
def records(lib: Any, weights: Weights, sequences: list[Tensor]) -> list[TrajectoryRecords]:
    return lib.roll_out(weights, sequences)[0]


def changed(
    record: TrajectoryRecords, part: Part, write: Callable[[Tensor], None]
) -> TrajectoryRecords:
    """Return the record with some bytes of one part's rows written over."""
    name = part.value
    rows = getattr(record, name).clone()
    write(rows)
    return replace(record, **{name: rows})


def refused(lib: Any, records: list[Any], sequences: list[Tensor], match: str) -> None:
    from megatron_trace.records.record_check import InvalidRecord

    with pytest.raises(InvalidRecord, match=match) as error:
        lib.packed(records, sequences)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


@given(
    position=st.integers(0, 2),
    layer=st.integers(0, 3),
    ids=st.lists(st.integers(0, 255), min_size=2, max_size=2),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_row_names_k_different_experts_of_the_model(
    lib: Any, sequences: Any, records: Any, position: int, layer: int, ids: list[int]
) -> None:
    def write(rows: Tensor) -> None:
        lib.FULL_LAYOUT.write_routes(rows[position : position + 1], layer, torch.tensor([ids]))

    batch = [records[0], changed(records[1], Part.FORWARD, write)]
    if len(set(ids)) == 2 and max(ids) < SHAPE.num_experts:
        assert lib.packed(batch, sequences).num_tokens == 10
    else:
        what = "beyond the 8 experts" if max(ids) >= SHAPE.num_experts else "twice among its 2"
        refused(lib, batch, sequences, f"'t1' at position {position} .*{what} in layer {layer}")


@pytest.mark.parametrize("site", [Site.FC1, Site.FC2, Site.K, Site.V])
@pytest.mark.parametrize("code", [0x7F, 0x80, 0xFF])
def test_a_block_scale_is_a_number(
    lib: Any, sequences: Any, records: Any, site: Site, code: int
) -> None:
    def write(rows: Tensor) -> None:
        scales_u8 = lib.FULL_LAYOUT.site(rows, site, 2).scales_u8
        scales_u8[3][..., -1] = code

    part = PART_OF[site]
    bad = changed(records[0], part, write)
    refused(
        lib, [bad, records[1]], sequences, rf"'t0' at position 3 .*block scale of {site}.*layer 2"
    )
    # Nobody follows what is not valid.
    unknown = replace(bad, **{f"{part.value}_valid": torch.zeros(6, dtype=torch.bool)})
    batch = lib.packed([unknown, records[1]], sequences, on_missing="round_to_nearest")
    assert batch.num_tokens == 10


@pytest.mark.parametrize("site", [Site.FC1, Site.FC2])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_token_scale_is_positive_and_finite(
    lib: Any, sequences: Any, records: Any, site: Site, scale: float
) -> None:
    def write(rows: Tensor) -> None:
        layout = lib.FULL_LAYOUT
        (field,) = [
            field
            for field in layout.fields(Part.FORWARD)
            if (field.site, field.layer, field.kind.value) == (site, 1, "token_scale")
            and field.slot in (None, 1)
        ]
        scale_bytes = torch.tensor([scale]).view(torch.uint8)
        rows[2, field.offset : field.offset + 4] = scale_bytes

    bad = changed(records[0], Part.FORWARD, write)
    refused(lib, [bad, records[1]], sequences, f"'t0' at position 2 .*token scale of {site}")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -2.0])
def test_global_scales_of_keys_and_values_are_positive_and_finite(
    lib: Any, sequences: Any, records: Any, scale: float
) -> None:
    bad = [replace(record, kv_scales={3: (1.0, scale)}) for record in records]
    refused(lib, bad, sequences, "in layer 3: they must be positive and finite")


def test_scales_of_two_bits_are_never_refused(lib: Any, weights: Weights, sequences: Any) -> None:
    layout = RecordLayout(SHAPE, (2, 3), tuple(Site), 1, scale_bits=2)
    records, _ = lib.roll_out(weights, sequences, layout=layout)
    filled = [replace(record, kv=torch.full_like(record.kv, 255)) for record in records]
    assert lib.packed(filled, sequences).num_tokens == 10
