"""NaN is found in rows of either width of scales before they are sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bridge.errors import NonFiniteActivation
from bridge.fp4.nvfp4 import Fp4Tensor, pack_nibbles, quantize_nvfp4, token_scale
from bridge.layout import ModelShape, Part, RecordLayout, Site
from sglang_trace.capture.kv_cpu import KVReader
from sglang_trace.capture.nan_check import NonFiniteRows

SHAPE = ModelShape(2, 64, 32, 4, 2, 2, 16, (0, 1), (0, 1))
ROWS = 3
WIDTHS = {Site.FC1: (64,), Site.FC2: (2, 32), Site.K: (32,), Site.V: (32,)}

both_widths = pytest.mark.parametrize("scale_bits", [8, 2])
poisons = pytest.mark.parametrize("poison", [float("nan"), float("inf")])


def layout_of(scale_bits: int) -> RecordLayout:
    return RecordLayout(SHAPE, (0, 1), tuple(Site), 1, scale_bits)


def values_of(site: Site, poison: float | None = None) -> Fp4Tensor:
    x = torch.randn(ROWS, *WIDTHS[site], generator=torch.Generator().manual_seed(0))
    if poison is not None:
        x[1].flatten()[5] = poison
    of_token = site in (Site.FC1, Site.FC2)
    return quantize_nvfp4(x, token_scale(x) if of_token else torch.ones(()))


def forward_rows(layout: RecordLayout, poisoned: Site | None, poison: float) -> Tensor:
    rows = torch.zeros(ROWS, layout.row_bytes(Part.FORWARD), dtype=torch.uint8)
    for site in (Site.FC1, Site.FC2):
        for layer in layout.layers:
            here = site is poisoned and layer == 1
            fp4 = values_of(site, poison if here else None)
            layout.write_site(rows, site, layer, fp4.codes_u8, fp4.scales_u8, fp4.global_scale)
    return rows


@both_widths
@poisons
@pytest.mark.parametrize("site", [Site.FC1, Site.FC2])
def test_activations_that_are_not_finite_are_named(
    scale_bits: int, poison: float, site: Site
) -> None:
    layout = layout_of(scale_bits)
    with pytest.raises(NonFiniteActivation, match=f"{site} of layer 1"):
        NonFiniteRows(layout).refuse(Part.FORWARD, forward_rows(layout, site, poison))


@both_widths
def test_finite_rows_and_rows_of_routes_alone_pass(scale_bits: int) -> None:
    layout = layout_of(scale_bits)
    NonFiniteRows(layout).refuse(Part.FORWARD, forward_rows(layout, None, 0.0))
    routes = layout.narrow(sites=(Site.ROUTES,))
    rows = torch.full((ROWS, routes.row_bytes(Part.FORWARD)), 0xFF, dtype=torch.uint8)
    NonFiniteRows(routes).refuse(Part.FORWARD, rows)


@both_widths
@poisons
@pytest.mark.parametrize("site", [Site.K, Site.V])
def test_keys_and_values_that_are_not_finite_are_named(
    scale_bits: int, poison: float, site: Site
) -> None:
    layout = layout_of(scale_bits)
    with pytest.raises(NonFiniteActivation, match=f"{site} of layer 0"):
        send_kv(layout, site, poison)


@both_widths
def test_finite_keys_and_values_pass(scale_bits: int) -> None:
    send_kv(layout_of(scale_bits), None, 0.0)


def send_kv(layout: RecordLayout, poisoned: Site | None, poison: float) -> None:
    """What the shipper's thread does with slots of a pool whose layer 0 may hold a poisoned row."""

    def buffers(layer: int) -> tuple[Tensor, ...]:
        stored = [
            values_of(site, poison if site is poisoned and layer == 0 else None)
            for site in (Site.K, Site.V)
        ]
        codes = [pack_nibbles(fp4.codes_u8).view(ROWS, 2, 8) for fp4 in stored]
        return (*codes, *(fp4.scales_u8.view(ROWS, 2, 1) for fp4 in stored))

    reader = KVReader(layout, SimpleNamespace(get_raw_kv_buffer=buffers))
    rows = reader.encode(reader.gather(torch.arange(ROWS)))
    NonFiniteRows(layout).refuse(Part.KV, rows)
