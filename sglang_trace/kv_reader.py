"""Read K and V records out of the FP4 KV pool: the pool already is the record.

Shape legend: n rows, H KV heads, D head size, B bytes of a KV row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bridge.fp4 import unpack_nibbles
from bridge.layout import Part, RecordLayout, Site


@dataclass(frozen=True)
class RawKV:
    """One site of one layer as the pool stores it: packed [n, H, D/2], E4M3 scales [n, H, D/16]."""

    site: Site
    layer: int
    packed: Tensor
    scales: Tensor


def kv_layers(layout: RecordLayout) -> list[int]:
    """Return the layers whose K or V is recorded."""
    return sorted({*layout.site_layers(Site.K), *layout.site_layers(Site.V)})


def kv_scales(layout: RecordLayout, pool: Any) -> dict[int, tuple[float, float]]:
    """Return the global K and V scale of every captured layer, the same on all ranks."""
    layers = kv_layers(layout)
    if not layers:
        return {}
    method = pool.quant_method
    return {layer: (method.k_scales_float[layer], method.v_scales_float[layer]) for layer in layers}


class KVReader:
    """Copies what the pool holds in given slots and lays it out as rows of the KV part."""

    def __init__(self, layout: RecordLayout, pool: Any) -> None:
        self._layout = layout
        self._pool = pool
        self._layers = kv_layers(layout)

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
            codes = unpack_nibbles(piece.packed.cpu()).flatten(1)
            self._layout.write_site(
                rows_nB, piece.site, piece.layer, codes, piece.scales.cpu().flatten(1)
            )
        return rows_nB
