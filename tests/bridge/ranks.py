"""An engine of several ranks: the activations of its rows, and what each rank sends of them.

Rows are written with `RecordLayout.write_site` from code words, once whole and once a rank, so that
joined rows are compared with rows that were never divided.

Shape legend: n rows, K expert slots, N values of a site.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridge.layout import ModelShape, Part, RecordLayout, Shard, Site
from bridge.layout.rank_shards import rank_shards
from bridge.layout.site import PART_OF

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=64,
    moe_intermediate_size=64,
    num_experts=8,
    top_k=3,
    num_kv_heads=2,
    head_dim=32,
    moe_layers=(0, 1, 2, 3),
    attention_layers=(1, 2, 3),
)


@dataclass(frozen=True)
class Ranks:
    """Rows 0..n-1 as `tp` ranks compute them, `ep` groups of which hold different experts."""

    layout: RecordLayout
    rows: int
    tp: int
    ep: int
    seed: int = 0

    @property
    def shards(self) -> tuple[Shard, ...]:
        return rank_shards(self.layout, self.tp, self.ep)

    def whole(self, part: Part, layout: RecordLayout | None = None) -> NDArray[np.uint8]:
        """Rows of a part in the engine's layout, or in one that was narrowed from it."""
        layout = layout or self.layout
        rows = torch.zeros(self.rows, layout.row_bytes(part), dtype=torch.uint8)
        for site in layout.sites:
            for layer in layout.site_layers(site) if PART_OF[site] is part else ():
                self._write(layout, rows, site, layer)
        return rows.numpy()

    def sent(self, rank: int, part: Part) -> NDArray[np.uint8]:
        """What a rank sends of all rows."""
        shard = self.shards[rank]
        rows = self.whole(part, shard.layout)
        if not shard.by_slot or part is Part.KV:
            return rows
        computed = self.owners() == rank // (self.tp // self.ep)
        for row, slot in zip(*np.nonzero(~computed), strict=True):
            rows[row, shard.slot_columns[slot]] = 0xEE  # nothing that a rank knows
        return shard.pack(rows, computed)

    def owners(self) -> NDArray[np.int64]:
        """Which group of ranks holds the expert of every slot: [n, slots of all layers]."""
        slots = len(self.layout.site_layers(Site.FC2)) * SHAPE.top_k
        return np.random.default_rng(self.seed).integers(0, self.ep, (self.rows, slots))

    def _write(self, layout: RecordLayout, rows: Tensor, site: Site, layer: int) -> None:
        draw = np.random.default_rng((self.seed, list(Site).index(site), layer))
        if site is Site.ROUTES:
            ids = draw.integers(0, SHAPE.num_experts, (self.rows, SHAPE.top_k))
            layout.write_routes(rows, layer, torch.from_numpy(ids))
            return
        slots = (SHAPE.top_k,) if site is Site.FC2 else ()
        width = RecordLayout(self.layout.shape, (layer,), (site,)).width(site)
        codes = draw.integers(0, 16, (self.rows, *slots, width), dtype=np.uint8)
        scales = draw.integers(0, 256, (self.rows, *slots, width // 16), dtype=np.uint8)
        token = draw.random((self.rows, *slots, 1), dtype=np.float32)
        held = layout.values(site)
        layout.write_site(
            rows,
            site,
            layer,
            torch.from_numpy(codes[..., held.start : held.stop]),
            torch.from_numpy(scales[..., held.start // 16 : held.stop // 16]),
            torch.from_numpy(token) if PART_OF[site] is Part.FORWARD else None,
        )
