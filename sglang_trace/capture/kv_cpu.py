"""Read K and V records out of the FP4 KV pool on a CPU: the pool already is the record.

Shape legend: T positions of a request, n rows, H KV heads, D head size, B bytes of a KV row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bridge.formats import FULL_SCALE_BITS
from bridge.fp4.nvfp4 import has_nan_scale, unpack_nibbles
from bridge.layout import Part, RecordLayout, Site
from sglang_trace.capture.events import RowsEvent
from sglang_trace.capture.nan_check import rollout_computed_nan
from sglang_trace.weights.versions import WeightVersions


@dataclass(frozen=True)
class RawKV:
    """One site of one layer as the pool stores it: packed [n, H, D/2], E4M3 scales [n, H, D/16]."""

    site: Site
    layer: int
    packed: Tensor
    scales: Tensor


class KVReader:
    """Copies what the pool holds in given slots and lays it out as rows of the KV part."""

    def __init__(self, layout: RecordLayout, pool: Any) -> None:
        self._layout = layout
        self._pool = pool
        self._layers = layout.layers_of(Site.K, Site.V)

    def events(
        self, rows_T: Tensor, slots_T: Tensor, due_T: Tensor, versions: WeightVersions
    ) -> Iterator[RowsEvent]:
        """Yield what is due at these positions, by the weights that computed it.

        Must end before the slots are given back.
        """
        rows_n, slots_n = rows_T[due_T], slots_T[due_T]
        for weights, mask_n in versions.split(rows_n):
            pieces = self.gather(slots_n[mask_n])
            nbytes = sum(piece.packed.nbytes + piece.scales.nbytes for piece in pieces)
            encode = partial(self.encode, pieces)
            yield RowsEvent(Part.KV, rows_n[mask_n], weights, encode, nbytes)

    def gather(self, slots_n: Tensor) -> list[RawKV]:
        """Copy codes and scales of these slots; must run before the slots are given back."""
        pieces = []
        for layer in self._layers:
            k, v, k_scales, v_scales = self._pool.get_raw_kv_buffer(layer)
            for site, packed, scales in ((Site.K, k, k_scales), (Site.V, v, v_scales)):
                if layer in self._layout.site_layers(site):
                    found = scales.view(torch.uint8)[slots_n]
                    pieces.append(RawKV(site, layer, packed[slots_n], found))
        return pieces

    def encode(self, pieces: list[RawKV]) -> Tensor:
        """Return the rows uint8 [n, B] of gathered pieces."""
        count = len(pieces[0].packed)
        rows_nB = torch.empty((count, self._layout.row_bytes(Part.KV)), dtype=torch.uint8)
        for piece in pieces:
            codes = unpack_nibbles(piece.packed).flatten(1)
            scales = piece.scales.flatten(1)
            if self._layout.scale_bits != FULL_SCALE_BITS and has_nan_scale(scales):
                raise rollout_computed_nan(piece.site, piece.layer)
            self._layout.write_site(rows_nB, piece.site, piece.layer, codes, scales)
        return rows_nB


def global_scales(layout: RecordLayout, pool: Any) -> dict[int, tuple[float, float]]:
    """Return the global K and V scale of every captured layer, the same on all ranks."""
    layers = layout.layers_of(Site.K, Site.V)
    if not layers:
        return {}
    method = pool.quant_method
    return {layer: (method.k_scales_float[layer], method.v_scales_float[layer]) for layer in layers}
