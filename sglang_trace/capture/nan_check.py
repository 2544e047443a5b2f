"""Rows of NaN are refused before they are sent.

A full block scale says NaN by its code and a token's scale by its value. Two bits of a block scale
say nothing: then the token's scale speaks for fc1 and fc2, and K and V are looked at while their
scales are whole, in `kv_reader`.

Shape legend: n rows, B bytes of a row part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.errors import NonFiniteActivation
from bridge.formats import FULL_SCALE_BITS
from bridge.fp4.nvfp4 import has_nan_scale
from bridge.layout import Kind, Part, RecordLayout, Site, SiteRecord


class NonFiniteRows:
    """Looks for NaN in rows of one layout."""

    def __init__(self, layout: RecordLayout) -> None:
        self._layout = layout
        self._full = layout.scale_bits == FULL_SCALE_BITS
        kind = Kind.SCALES if self._full else Kind.TOKEN_SCALE
        self._columns = {part: columns_of(layout, part, kind) for part in Part}

    def refuse(self, part: Part, rows_nB: Tensor) -> None:
        """Raise NonFiniteActivation, naming the site, if rows on the host hold NaN."""
        # All scales at once: site by site would hold Python's lock for most of a decode step.
        scales = rows_nB.index_select(1, self._columns[part])
        if not (has_nan_scale(scales) if self._full else _has_nan_token(scales)):
            return
        for (site, layer), record in self._layout.split(part, rows_nB).items():
            if self._is_nan(record):
                raise rollout_computed_nan(site, layer)

    def _is_nan(self, record: SiteRecord) -> bool:
        if self._full:
            return has_nan_scale(record.scales_u8)
        return record.token_scale is not None and bool(record.token_scale.isnan().any())


def columns_of(layout: RecordLayout, part: Part, kind: Kind) -> Tensor:
    """Return the byte columns of all fields of a kind in a row part: int64."""
    fields = [field for field in layout.fields(part) if field.kind is kind]
    columns = [torch.arange(field.offset, field.offset + field.nbytes) for field in fields]
    return torch.cat([torch.empty(0, dtype=torch.int64), *columns])


def rollout_computed_nan(site: Site, layer: int) -> NonFiniteActivation:
    """Return the error that ends a server whose activations are not finite."""
    return NonFiniteActivation(
        f"The rollout computed NaN or infinity at {site} of layer {layer}: "
        "check the weights that were loaded last."
    )


def _has_nan_token(scales_u8: Tensor) -> bool:
    return bool(scales_u8.flatten().view(torch.float32).isnan().any())
