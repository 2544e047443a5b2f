"""The records of one micro-batch, in the order in which the model sees its tokens.

Shape legend: b sequences, s padded length, N tokens of the micro-batch in model order (padded
batches: [s, b] flattened, packed ones: as packed), W bytes per row, L MoE layers, K expert slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from bridge.errors import NonFiniteActivation, TraceError
from bridge.layout import ModelShape, RecordLayout, Site
from bridge.layout.site import PART_OF
from megatron_trace.parallel import ContextParallel
from megatron_trace.records.aligned_rows import (
    AlignedRows,
    VersionPolicy,
    align_rows,
    check_one_meaning,
)
from megatron_trace.records.coverage import Coverage
from megatron_trace.records.guidance import Guidance, GuidanceError
from megatron_trace.records.input_check import ForwardCheck
from megatron_trace.records.record_check import check_kv_scales, check_rows
from megatron_trace.records.token_placement import TokenPlacement
from megatron_trace.rounding.rows import COUNTER_LANES, Counter, GuidanceSpec, RowState, SiteRows
from megatron_trace.telemetry.report import Report, SiteCount

if TYPE_CHECKING:
    from bridge.client.records import TrajectoryRecords

_SITES = tuple(Site)


class MissingRecords(TraceError):
    """Rows that should guide the micro-batch were not recorded."""


class GuidedMicroBatch:
    """The records that guide one forward, on the model's device, and the counts it leaves.

    Build it with `from_records`, run the forward under `guide(micro_batch)`, read `report()`.
    """

    def __init__(
        self,
        layout: RecordLayout,
        kv_scales: dict[int, tuple[float, float]],
        rows: AlignedRows,
        guidance: Guidance,
        placement: TokenPlacement,
    ) -> None:
        self.layout = layout
        self.kv_scales = kv_scales
        self.rows = rows
        self.guidance = guidance
        self.check = ForwardCheck(placement, rows.device)
        self.coverage = Coverage()
        self._layers = set(layout.layers if guidance.layers is None else guidance.layers)
        chosen = layout.sites if guidance.sites is None else guidance.sites
        self._sites = {site for site in chosen if layout.site_layers(site)}
        shape = (len(_SITES), layout.shape.num_layers, COUNTER_LANES, len(Counter))
        self._counts = torch.zeros(shape, dtype=torch.int64, device=rows.device)

    @classmethod
    def from_records(
        cls,
        records: Sequence[TrajectoryRecords | None],
        tokens: Tensor,
        *,
        weight_version: str | None,
        max_version_lag: int = 0,
        lengths: Sequence[int] | Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cu_seqlens_padded: Sequence[int] | Tensor | None = None,
        pad_sequence: bool = False,
        guidance: Guidance | None = None,
        layout: RecordLayout | None = None,
        device: torch.device | str | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> Self:
        """Line up records with the tokens that the model will be given.

        Args:
            records: one for each sequence, in order, fetched from position 0; None where nothing
                was recorded (allowed with `on_missing="round_to_nearest"`).
            tokens: the model's input ids: [b, s] right-padded, or [1, t] packed.
            weight_version: the version of the weights the trainer holds; None accepts any. SGLang
                calls weights "default" until an update or --weight-version names them.
            max_version_lag: how much smaller a row's integer weight version may be.
            lengths: padded batches: the tokens of each sequence; None means all s.
            cu_seqlens: packed batches: Megatron's cumulative lengths [b + 1].
            cu_seqlens_padded: packed batches with padding between sequences, as in Megatron.
            pad_sequence: packed batches: the last sequence of cu_seqlens is padding and has no
                record, as where a pack is filled up to a multiple of its length.
            guidance: see `Guidance`; by default everything recorded is followed.
            layout: the records' layout, needed only if every record is None.
            device: where the model runs; the device of `tokens` by default.
            context_parallel: which tokens of every sequence this rank computes; None takes its
                place in Megatron's context-parallel group. `tokens` and lengths are always those
                of the whole sequences, before they are split.

        Raises:
            GuidanceError: if records differ in layout, or `guidance` asks for what they lack.
            PlacementError: if tokens and lengths do not fit.
            UnevenContext: if a sequence does not divide over the context-parallel ranks.
            SequenceCountMismatch: if there is not one record (or None) for each sequence.
            TokenMismatch: if a trajectory holds other tokens.
            WeightVersionMismatch: if rows were computed with other weights, or one version stands
                for two different weights.
            InvalidRecord: if a row holds expert ids or scales that no rollout records.
            MissingRecords: if rows are missing and `guidance.on_missing` is "error".
        """
        guidance = guidance or Guidance()
        layout = _common_layout(records, layout)
        guidance.check(layout)
        if cu_seqlens is None:
            placement = TokenPlacement.padded(tokens, lengths)
        else:
            placement = TokenPlacement.packed(tokens, cu_seqlens, cu_seqlens_padded)
        if pad_sequence:
            placement = placement.without_last()
        placement = placement.on_context_rank(context_parallel or ContextParallel.current())
        strict = guidance.on_missing == "error"
        versions = VersionPolicy(weight_version, max_version_lag, strict)
        check_one_meaning(records)
        rows = align_rows(records, layout, placement, versions)
        check_rows(rows, layout, placement, records)
        kv_scales = _common_kv_scales(records)
        check_kv_scales(kv_scales)
        here = rows.to(device or tokens.device)
        micro_batch = cls(layout, kv_scales, here, guidance, placement)
        if strict:
            _require_complete(rows, micro_batch._sites)
        return micro_batch

    def finish_forward(self) -> None:
        """End a forward under `guide`: raise what was found about what the model was given."""
        self.check.settle()
        self.coverage.require(self._sites)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream uses the records, which another stream has copied to the device."""
        rows = (getattr(self.rows, name) for name in self.rows.__dataclass_fields__)
        for tensor in (*rows, self._counts, *self.check.tensors()):
            tensor.record_stream(stream)

    @property
    def num_tokens(self) -> int:
        """N, the tokens the model computes, padding included."""
        return self.rows.num_tokens

    def check_shape(self, shape: ModelShape) -> None:
        """Refuse records of another model.

        Raises:
            GuidanceError: naming the first size that differs.
        """
        if self.layout.shape == shape:
            return
        for name in shape.__dataclass_fields__:
            theirs, ours = getattr(self.layout.shape, name), getattr(shape, name)
            if theirs != ours:
                raise GuidanceError(
                    f"The records are of a model with {name} {theirs}, the trainer's has {ours}: "
                    "fetch the trajectories of the model that is trained."
                )

    def site_rows(self, site: Site, layer: int, tokens: slice, counting: bool) -> SiteRows | None:
        """Return the records of `site` for a run of tokens; None if nothing is to be done."""
        if not self.uses(site, layer):
            return None
        guided = self._guides(site, layer)
        bits = (self.guidance.bits or self.layout.bits) if guided else 0
        part = PART_OF[site]
        record = self.layout.site(self.rows.of(part)[tokens], site, layer)
        global_scale = record.token_scale
        if global_scale is None:
            global_scale = self.kv_global_scale(site, layer)
        return SiteRows(
            record,
            global_scale,
            self.rows.state_of(part)[tokens],
            GuidanceSpec(
                bits,
                self.guidance.scale_bits or self.layout.scale_bits,
                self.guidance.reading,
                self.guidance.compare,
            ),
            self.counts(site, layer) if counting else None,
            self.layout.values(site),
        )

    def uses(self, site: Site, layer: int) -> bool:
        """Whether the records of `site` in `layer` are followed or compared with."""
        recorded = layer in self.layout.site_layers(site)
        return recorded and (self._guides(site, layer) or self.guidance.compare)

    def _guides(self, site: Site, layer: int) -> bool:
        return site in self._sites and layer in self._layers

    @property
    def replays_routes(self) -> bool:
        """Whether recorded expert ids replace the router's own choice."""
        return Site.ROUTES in self._sites

    def routes(self, layer: int, tokens: slice) -> Tensor:
        """Return the recorded expert ids of MoE layer `layer`: int64 [tokens, K]."""
        moe_index = self.layout.shape.moe_layers.index(layer)
        return self._routes_NLK[tokens, moe_index].to(torch.int64)

    def kv_global_scale(self, site: Site, layer: int) -> Tensor:
        """Return the rollout's scale of K or V in `layer`, float32 [], 1.0 by default."""
        k_scale, v_scale = self.kv_scales.get(layer, (1.0, 1.0))
        scale = k_scale if site is Site.K else v_scale
        return torch.full((), scale, dtype=torch.float32, device=self.rows.device)

    def counts(self, site: Site, layer: int) -> Tensor:
        """Return the counters of a site, int64 [COUNTER_LANES, len(Counter)], to add to."""
        return self._counts[_SITES.index(site), layer]

    def report(self, group: torch.distributed.ProcessGroup | None = None) -> Report:
        """Return the counts of all forwards so far; waits for the device.

        A log-prob pass and a training pass under one micro-batch add up: build one for each pass to
        report them apart.

        Args:
            group: sum over the ranks of this group, all of which must call.

        Raises:
            NonFiniteActivation: if a rounded tensor held NaN or infinity.
        """
        counts = self._counts.sum(dim=2)
        if group is not None:
            torch.distributed.all_reduce(counts, group=group)
        table = counts.tolist()
        _require_finite(table)
        return Report(
            {
                (site, layer): SiteCount(*table[i][layer][: Counter.NON_FINITE])
                for i, site in enumerate(_SITES)
                for layer in range(self.layout.shape.num_layers)
                if any(table[i][layer])
            }
        )

    @cached_property
    def _routes_NLK(self) -> Tensor:
        # int16 holds every expert id up to 32767 at a quarter of the memory.
        return self.layout.routes(self.rows.forward_rows).to(torch.int16)


def _common_layout(
    records: Sequence[TrajectoryRecords | None], layout: RecordLayout | None
) -> RecordLayout:
    layouts = {record.layout for record in records if record is not None}
    if layout is not None:
        layouts.add(layout)
    if len(layouts) != 1:
        raise GuidanceError(
            f"A micro-batch needs records of one layout, got {len(layouts)}: fetch all its "
            "trajectories with the same layers and sites (or pass layout= if none is recorded)."
        )
    return layouts.pop()


def _common_kv_scales(
    records: Sequence[TrajectoryRecords | None],
) -> dict[int, tuple[float, float]]:
    tables = [record.kv_scales for record in records if record is not None]
    if any(table != tables[0] for table in tables):
        raise GuidanceError(
            "The records were made with different K/V scales: put trajectories of engines with "
            "different scales into different micro-batches."
        )
    return {int(layer): (k, v) for layer, (k, v) in tables[0].items()} if tables else {}


def _require_complete(rows: AlignedRows, sites: set[Site]) -> None:
    for part in {PART_OF[site] for site in sites}:
        missing = int((rows.state_of(part) == RowState.MISSING).sum())
        if missing:
            raise MissingRecords(
                f"{missing} of {rows.num_tokens} tokens have no {part} record: wait until the "
                'requests have finished, pass Guidance(on_missing="round_to_nearest"), or '
                "pad_sequence=True if they are the padding at the end of a pack."
            )


def _require_finite(table: list[list[list[int]]]) -> None:
    for site, layers in zip(_SITES, table, strict=True):
        for layer, counts in enumerate(layers):
            if counts[Counter.NON_FINITE]:
                raise NonFiniteActivation(
                    f"{counts[Counter.NON_FINITE]} values in blocks with NaN or infinity were "
                    f"rounded at {site} of layer {layer}: look for the first layer that "
                    "overflows, for instance with a smaller learning rate."
                )
