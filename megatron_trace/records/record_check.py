"""Whether recorded rows can be what a rollout wrote: checked before anything follows them.

Bytes pass checksums on their way, so what is refused here was recorded wrongly or belongs to
another layout. In a forward it would be an index out of range on the device, or NaN.

Shape legend: N tokens in model order, L MoE layers, K expert slots, B blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bridge.errors import TraceError
from bridge.formats import FULL_SCALE_BITS
from bridge.layout import RecordLayout, Site
from bridge.layout.site import PART_OF
from megatron_trace.records.aligned_rows import AlignedRows
from megatron_trace.records.token_placement import TokenPlacement
from megatron_trace.rounding.rows import RowState

if TYPE_CHECKING:
    from bridge.client.records import TrajectoryRecords

_NAN_SCALE = 0x7F  # E4M3 codes from here on are NaN or negative, which no block scale is


class InvalidRecord(TraceError):
    """A row holds values that no rollout records."""


def check_rows(
    rows: AlignedRows,
    layout: RecordLayout,
    placement: TokenPlacement,
    records: Sequence[TrajectoryRecords | None],
) -> None:
    """Refuse recorded rows with impossible expert ids or scales.

    Raises:
        InvalidRecord: naming trajectory, position, site and layer of the first.
    """
    for layer, bad_N, why in _findings(rows, layout):
        if bool(bad_N.any()):
            where = _where(int(bad_N.nonzero()[0]), placement, records)
            raise InvalidRecord(
                f"{where} holds {why} in layer {layer}: its record was not written by this "
                "release's rollout; generate it again, or leave the trajectory out."
            )


def check_kv_scales(kv_scales: Mapping[int, tuple[float, float]]) -> None:
    """Refuse global K and V scales that are not positive and finite.

    Raises:
        InvalidRecord: naming the layer.
    """
    for layer, scales in kv_scales.items():
        if not all(0 < scale < float("inf") for scale in scales):
            raise InvalidRecord(
                f"The records have the global K and V scales {scales} in layer {layer}: they must "
                "be positive and finite; generate again with a valid KV cache scale."
            )


def _findings(rows: AlignedRows, layout: RecordLayout) -> list[tuple[int, Tensor, str]]:
    """Return (layer, bool [N], what is wrong) of every check."""
    found = []
    if layout.site_layers(Site.ROUTES):
        found += _routes(rows, layout)
    for site in (Site.FC1, Site.FC2, Site.K, Site.V):
        part = PART_OF[site]
        recorded_N = rows.state_of(part) == RowState.RECORDED
        for layer in layout.site_layers(site):
            record = layout.site(rows.of(part), site, layer)
            if layout.scale_bits == FULL_SCALE_BITS:
                bad_N = (record.scales_u8 >= _NAN_SCALE).flatten(1).any(1)
                found.append((layer, recorded_N & bad_N, f"a block scale of {site} that is NaN"))
            if record.token_scale is not None:
                valid = torch.isfinite(record.token_scale) & (record.token_scale > 0)
                bad_N = ~valid.flatten(1).all(1)
                why = f"a token scale of {site} that is not positive and finite"
                found.append((layer, recorded_N & bad_N, why))
    return found


def _routes(rows: AlignedRows, layout: RecordLayout) -> list[tuple[int, Tensor, str]]:
    experts, top_k = layout.shape.num_experts, layout.shape.top_k
    recorded_N1 = (rows.forward_state == RowState.RECORDED).unsqueeze(-1)
    ids_NLK = layout.routes(rows.forward_rows)
    beyond_NL = recorded_N1 & (ids_NLK >= experts).any(-1)
    twice_NL = torch.zeros_like(beyond_NL)
    for shift in range(1, top_k):
        twice_NL |= (ids_NLK[..., shift:] == ids_NLK[..., :-shift]).any(-1)
    twice_NL &= recorded_N1
    found = []
    for at, layer in enumerate(layout.shape.moe_layers):
        found.append((layer, beyond_NL[:, at], f"an expert id beyond the {experts} experts"))
        found.append((layer, twice_NL[:, at], f"an expert twice among its {top_k}"))
    return found


def _where(
    place: int, placement: TokenPlacement, records: Sequence[TrajectoryRecords | None]
) -> str:
    for record, places_P in zip(records, placement.sequences, strict=False):
        at = (places_P == place).nonzero()
        if record is not None and len(at):
            return f"Trajectory {record.trajectory!r} at position {int(at[0])}"
    raise AssertionError("a recorded row belongs to a trajectory")
