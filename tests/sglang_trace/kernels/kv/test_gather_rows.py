"""KV rows gathered on the device against the record layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.fp4.nvfp4 import unpack_nibbles
from bridge.layout import ModelShape, Part, RecordLayout, Site
from sglang_trace.kernels.kv.gather_rows import KVRows, PoolSite
from tests.sglang_trace.kernels.inputs import DEVICE, needs_gpu


def pool_of(layout: RecordLayout, slots: int, seed: int) -> list[PoolSite]:
    """A pool of random bytes, the buffers in no particular order."""
    generator = torch.Generator().manual_seed(seed)
    heads, size = layout.shape.num_kv_heads, layout.shape.head_dim

    def random(width: int) -> Tensor:
        shape = (slots, heads, width)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)

    return [
        PoolSite(site, layer, random(size // 2), random(size // 16))
        for site in (Site.V, Site.K)
        for layer in reversed(layout.site_layers(site))
    ]


def check(
    layout: RecordLayout, slots: Tensor, pool: list[PoolSite], due: Tensor | None = None
) -> None:
    due = torch.ones(len(slots), dtype=torch.bool) if due is None else due
    numbers = torch.arange(len(slots)) + (1 << 40)
    wanted = slots[due]
    rows = torch.zeros(len(wanted), layout.row_bytes(Part.KV), dtype=torch.uint8)
    for place in pool:
        codes = unpack_nibbles(place.codes_PHd.cpu()[wanted]).flatten(1)
        scales = place.scales_PHb.cpu()[wanted].flatten(1)
        layout.write_site(rows, place.site, place.layer, codes, scales)
    found = KVRows(layout, pool).gather(slots.to(DEVICE), numbers.to(DEVICE), due.to(DEVICE))
    assert found.count_1.tolist() == [len(wanted)]
    assert torch.equal(found.rows_n[: len(wanted)].cpu(), numbers[due])
    assert torch.equal(found.rows_nB[: len(wanted)].cpu(), rows)


def layout_of(
    heads: int,
    size: int,
    bits: int,
    sites: tuple[Site, ...] = (Site.K, Site.V),
    scale_bits: int = 8,
) -> RecordLayout:
    shape = ModelShape(4, 64, 64, 8, 2, heads, size, (0, 1, 2, 3), (0, 1, 3))
    return RecordLayout(shape, (1, 2, 3), (Site.ROUTES, *sites), bits, scale_bits)


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 4),
    size=st.sampled_from((16, 48, 64)),
    bits=st.integers(1, 4),
    scale_bits=st.sampled_from((8, 2)),
    asked=st.lists(st.tuples(st.integers(0, 19), st.booleans()), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_any_slots_in_any_order_of_which_some_are_due(
    heads: int, size: int, bits: int, scale_bits: int, asked: list[tuple[int, bool]], seed: int
) -> None:
    layout = layout_of(heads, size, bits, scale_bits=scale_bits)
    slots, due = (torch.tensor(column) for column in zip(*asked, strict=True))
    check(layout, slots, pool_of(layout, 20, seed), due)


@pytest.mark.parametrize("site", [Site.K, Site.V])
def test_a_layout_with_one_of_the_two(site: Site) -> None:
    layout = layout_of(2, 32, 1, (site,))
    check(layout, torch.tensor([3, 0, 3]), pool_of(layout, 5, 0))


@pytest.mark.parametrize("scale_bits", [8, 2])
@pytest.mark.parametrize("nan_code", [0x7F, 0xFF])
def test_a_nan_scale_is_remembered_once_its_slot_is_due(scale_bits: int, nan_code: int) -> None:
    layout = layout_of(3, 48, 1, scale_bits=scale_bits)
    pool = pool_of(layout, 5, 0)
    for place in pool:
        place.scales_PHb.clamp_(max=0x7E)
    pool[1].scales_PHb[2, 1, 1] = nan_code
    rows = KVRows(layout, pool)
    numbers = torch.arange(5, device=DEVICE)
    every, place = torch.arange(5, device=DEVICE), (pool[1].site, pool[1].layer)
    for due, seen in ((every != 2, 0), (every == 2, 2), (every == 0, 2)):
        found = rows.gather(every, numbers, due)
        assert found.nan_1.tolist() == [seen]
    assert found.sites[1] == place


def test_a_pool_without_a_buffer_of_the_layout_is_a_mistake() -> None:
    layout = layout_of(2, 32, 1)
    with pytest.raises(AssertionError):
        KVRows(layout, pool_of(layout, 5, 0)[1:])


@pytest.mark.gpu
@needs_gpu
def test_ten_million_values_on_a_gpu() -> None:
    slots = torch.randperm(6000, generator=torch.Generator().manual_seed(1))[:5500]
    for scale_bits in (8, 2):
        layout = layout_of(4, 128, 1, scale_bits=scale_bits)
        check(layout, slots, pool_of(layout, 6000, 2))
