"""Records that a rollout could have made, of random values, for timing a trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.client.records import TrajectoryRecords
from bridge.fp4.nvfp4 import encode_e4m3
from bridge.layout import Part, RecordLayout, Site
from bridge.wire import TrajectoryState


def random_records(name: str, tokens: Tensor, layout: RecordLayout) -> TrajectoryRecords:
    """Return records of int64 tokens [T]; every row but the last token's is there."""
    length, shape = len(tokens), layout.shape
    rows = {
        part: torch.zeros(length, layout.row_bytes(part), dtype=torch.uint8)
        for part in (Part.FORWARD, Part.KV)
    }
    for layer in layout.layers:
        if Site.ROUTES in layout.sites:
            ids = torch.rand(length, shape.num_experts).topk(shape.top_k).indices
            layout.write_routes(rows[Part.FORWARD], layer, ids)
        for site in (Site.FC1, Site.FC2, Site.K, Site.V):
            if site in layout.sites:
                part = Part.KV if site in (Site.K, Site.V) else Part.FORWARD
                slots = (shape.top_k,) if site is Site.FC2 else ()
                width = layout.width(site)
                codes = torch.randint(16, (length, *slots, width), dtype=torch.uint8)
                scales = encode_e4m3(0.5 + torch.rand(length, *slots, width // 16))
                token_scale = torch.ones(length, *slots, 1) if part is Part.FORWARD else None
                layout.write_site(rows[part], site, layer, codes, scales, token_scale)
    return records_of(name, tokens, layout, rows[Part.FORWARD], rows[Part.KV])


def records_of(
    name: str, tokens: Tensor, layout: RecordLayout, forward: Tensor, kv: Tensor
) -> TrajectoryRecords:
    """Return what a bridge returns of a finished trajectory."""
    is_there = torch.arange(len(tokens)) < len(tokens) - 1
    index = torch.where(is_there, 0, -1).to(torch.int32)
    return TrajectoryRecords(
        trajectory=name,
        state=TrajectoryState.FINISHED,
        start=0,
        length=len(tokens),
        layout=layout,
        kv_scales={},
        tokens=tokens.to(torch.int32),
        forward=forward,
        forward_valid=is_there,
        kv=kv,
        kv_valid=is_there,
        weight_versions=("1",),
        weight_version_index=index,
        engine_ids=("engine",),
        engine_index=index,
        rows=torch.where(is_there, torch.arange(len(tokens)), -1),
        revision=1,
    )
