"""Static rows that the MoE layers of one forward pass write to.

The rows lie at a fixed address, so the writes can be part of a CUDA graph; what a forward pass has
left in them is copied before the next one starts.

Shape legend: M most rows of a forward pass, T rows of this one, B bytes of a row, H hidden size,
I expert width, K expert slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.errors import TraceError
from bridge.fp4.nvfp4 import Fp4Tensor
from bridge.layout import Part, RecordLayout, Site
from sglang_trace.kernels.staging_columns import LayerColumns


class StagingTooSmall(TraceError):
    """A forward pass has more tokens than the server said it would compute at once."""


class Staging:
    """uint8 [M, B] rows of the FORWARD part."""

    def __init__(self, layout: RecordLayout, max_rows: int, device: torch.device | str) -> None:
        self.layout = layout
        shape = (max_rows, layout.row_bytes(Part.FORWARD))
        self.rows_MB = torch.zeros(shape, dtype=torch.uint8, device=device)

    def head(self, count: int) -> Tensor:
        """Return the first `count` rows as a view."""
        if count > len(self.rows_MB):
            raise StagingTooSmall(
                f"A forward pass computes {count} tokens and room was made for "
                f"{len(self.rows_MB)}: set --chunked-prefill-size to a positive number."
            )
        return self.rows_MB[:count]

    def recorder(self, layer: int) -> LayerRecorder:
        """Return what writes the sites of one MoE layer."""
        return LayerRecorder(self, layer)


class LayerRecorder:
    """Writes what one MoE layer computed into the first T staging rows, T tokens of this pass.

    Kernels do not call it: they write at its `columns`.
    """

    def __init__(self, staging: Staging, layer: int) -> None:
        self._staging = staging
        self._layer = layer
        layout = staging.layout
        self._sites = {
            site: layer in layout.site_layers(site) for site in (Site.FC1, Site.FC2, Site.ROUTES)
        }
        self._columns = LayerColumns.of(layout, staging.rows_MB, layer)

    def columns(self, tokens: int) -> LayerColumns:
        """Return where a pass of `tokens` writes."""
        self._staging.head(tokens)
        return self._columns

    def routes(self, expert_ids_TK: Tensor) -> None:
        """Write the expert ids in the router's top-k order."""
        if self._sites[Site.ROUTES]:
            rows = self._staging.head(len(expert_ids_TK))
            self._staging.layout.write_routes(rows, self._layer, expert_ids_TK)

    def fc1(self, x_TH: Fp4Tensor) -> None:
        """Write the quantized input of the gate and up projections."""
        self._write(Site.FC1, x_TH)

    def fc2(self, h_TKI: Fp4Tensor) -> None:
        """Write the quantized input of the down projection, slot by slot."""
        self._write(Site.FC2, h_TKI)

    def _write(self, site: Site, values: Fp4Tensor) -> None:
        if self._sites[site]:
            rows = self._staging.head(len(values.codes_u8))
            self._staging.layout.write_site(
                rows, site, self._layer, values.codes_u8, values.scales_u8, values.global_scale
            )
