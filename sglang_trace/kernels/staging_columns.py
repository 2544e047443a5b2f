"""Where a layer's sites lie in a staging row, as numbers that a kernel takes.

Shape legend: M staging rows, B bytes of a row, K expert slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bridge.layout import Part, RecordLayout, Site


@dataclass(frozen=True)
class LayerColumns:
    """The staging rows and one MoE layer's columns in them; None where a site is not recorded.

    rows_MB  uint8 [M, B] rows of the FORWARD part, at a fixed address
    bits     bits kept of a code word
    scale_bits  bits kept of a block scale
    id_bytes bytes of an expert id
    routes, fc1, fc2  first column of the site; fc2's slots follow each other, `fc2_slot` bytes each
    """

    rows_MB: Tensor
    bits: int
    scale_bits: int
    id_bytes: int
    routes: int | None
    fc1: int | None
    fc2: int | None
    fc2_slot: int

    @classmethod
    def of(cls, layout: RecordLayout, rows_MB: Tensor, layer: int) -> LayerColumns:
        """Read the columns of MoE layer `layer` off the layout."""
        assert rows_MB.shape[1] == layout.row_bytes(Part.FORWARD)
        found = {
            site: layout.columns(site, layer) if layer in layout.site_layers(site) else None
            for site in (Site.ROUTES, Site.FC1, Site.FC2)
        }
        fc2 = found[Site.FC2]
        starts = {site: columns.start if columns else None for site, columns in found.items()}
        return cls(
            rows_MB,
            layout.bits,
            layout.scale_bits,
            layout.id_bytes,
            starts[Site.ROUTES],
            starts[Site.FC1],
            starts[Site.FC2],
            (fc2.stop - fc2.start) // layout.shape.top_k if fc2 else 0,
        )
