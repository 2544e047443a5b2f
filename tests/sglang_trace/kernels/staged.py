"""Staging rows that a kernel writes, and the same rows written by the record layout."""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.layout import ModelShape, Part, RecordLayout, Site
from sglang_trace.kernels.staging_columns import LayerColumns
from tests.sglang_trace.kernels.inputs import DEVICE

UNWRITTEN = 0xA5
FORWARD_SITES = (Site.ROUTES, Site.FC1, Site.FC2)


def layout_of(
    hidden: int,
    width: int,
    slots: int,
    bits: int,
    sites: tuple[Site, ...] = FORWARD_SITES,
    scale_bits: int = 8,
) -> RecordLayout:
    """Three MoE layers of 300 experts, of which the last two are captured."""
    shape = ModelShape(3, hidden, width, 300, slots, 1, 16, (0, 1, 2), (0, 1, 2))
    return RecordLayout(shape, (1, 2), sites, bits, scale_bits)


def empty_rows(layout: RecordLayout, rows: int) -> Tensor:
    """Staging rows in which a byte that nobody writes can be told."""
    return torch.full((rows, layout.row_bytes(Part.FORWARD)), UNWRITTEN, dtype=torch.uint8)


def place_of(layout: RecordLayout, rows: int, layer: int) -> LayerColumns:
    """Staging rows on the device under test, and a layer's columns in them."""
    return LayerColumns.of(layout, empty_rows(layout, rows).to(DEVICE), layer)
