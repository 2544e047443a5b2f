"""FP4 in the experts of one MoE layer: fc1 and fc2 inputs, and the router's probabilities.

Shape legend: S sequence, B batch, H hidden size, T tokens this rank computes, K expert slots,
E experts, P rows dispatched to this rank, I intermediate size (this rank's part), W bytes per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bridge.layout import ModelShape, Site
from megatron_trace.context import (
    current_scope,
    set_dispatched,
    set_unrounded_input,
    take_unrounded_input,
)
from megatron_trace.layers.weighing import learn_from_fc2_input, weigh, weigh_without_gradient
from megatron_trace.parallel import TensorParallel
from megatron_trace.rounding.expert_group import ExpertGroup
from megatron_trace.rounding.rows import (
    ExpertRows,
    RowState,
    SiteRows,
    own_token_scale,
    round_rows,
)
from megatron_trace.rounding.work_buffer import (
    refill_before_backward,
    release_after_backward,
    release_work_buffers,
)

if TYPE_CHECKING:
    from megatron_trace.layers.dispatch import RecordDispatcher
    from megatron_trace.records.microbatch import GuidedMicroBatch


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of MoE layer `layer`, as marked by `enable_fp4`.

    weights          fc1's and fc2's
    overlaps_shared  whether shared experts are computed while the tokens are dispatched
    are_grouped      whether one layer multiplies all experts, first fc1's and then fc2's
    learns_at_fc2    whether the input of fc2 can give the probabilities their gradient: it has all
                     rows at once, is not recomputed apart from the router, and fc2 has no bias
    """

    layer: int
    shape: ModelShape
    tokens: TensorParallel
    records: RecordDispatcher
    weights: tuple[ExpertGroup, ExpertGroup]
    overlaps_shared: bool = False
    are_grouped: bool = False
    learns_at_fc2: bool = False

    def round_input(self, hidden_SBH: Tensor) -> Tensor:
        """Round the experts' input, one row per token."""
        if self.overlaps_shared:
            set_unrounded_input(hidden_SBH)
        hidden_TH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
        rows = self._rows(Site.FC1, len(hidden_TH))
        rounded_TH = round_rows(release_after_backward(hidden_TH), None, rows)
        return rounded_TH.view_as(hidden_SBH)

    def enter(self, tokens_per_expert: Tensor, probs_P: Tensor) -> Tensor:
        """Dispatch the fc2 records after the tokens; return probabilities 1 for the experts."""
        for group in self.weights:
            group.begin_forward()
        micro_batch = current_scope().micro_batch
        rows_P = None
        if micro_batch is not None and micro_batch.uses(Site.FC2, self.layer):
            rows_P = ExpertRows(self._fc2_rows(), tokens_per_expert)
        set_dispatched(rows_P, probs_P if self.learns_at_fc2 and probs_P.is_cuda else None)
        return torch.ones_like(probs_P)

    def leave(self, output_PH: Tensor, probs_P: Tensor) -> Tensor:
        """Weigh the outputs as the rollout does, after fc2."""
        learns_at_fc2 = current_scope().probs is not None
        set_dispatched(None, None)
        output_PH = refill_before_backward(output_PH, self._first_refills())
        release_work_buffers()
        return (weigh_without_gradient if learns_at_fc2 else weigh)(output_PH, probs_P)

    def _first_refills(self) -> tuple[Callable[[], None], ...]:
        """Return what makes the weights be there when the experts' backward begins.

        Grouped experts need those of fc1 only later, and refill them themselves.
        """
        groups = self.weights[1:] if self.are_grouped else self.weights
        return tuple(refill for group in groups for refill in group.refills())

    def _rows(self, site: Site, num_tokens: int) -> SiteRows | None:
        scope = current_scope()
        if scope.micro_batch is None:
            return None
        scope.micro_batch.check_shape(self.shape)
        tokens = self.tokens.tokens_of(scope.micro_batch.num_tokens, num_tokens)
        return scope.micro_batch.site_rows(site, self.layer, tokens, scope.counting)

    def _fc2_rows(self) -> SiteRows:
        """Return the fc2 records of the rows that have been dispatched to this rank."""
        num_tokens = self.records.num_tokens
        rows_TK = self._rows(Site.FC2, num_tokens)
        assert rows_TK is not None
        return self._dispatched(rows_TK, self._slots(num_tokens))

    def _slots(self, num_tokens: int) -> Tensor:
        """Return the slot in which the rollout gave token t to expert e: int8 [T, E], -1: none."""
        micro_batch: GuidedMicroBatch | None = current_scope().micro_batch
        assert micro_batch is not None
        tokens = self.tokens.tokens_of(micro_batch.num_tokens, num_tokens)
        routes_TK = micro_batch.routes(self.layer, tokens)
        slots_TE = torch.full(
            (num_tokens, self.shape.num_experts), -1, dtype=torch.int8, device=routes_TK.device
        )
        slot_ids_K = torch.arange(self.shape.top_k, dtype=torch.int8, device=routes_TK.device)
        return slots_TE.scatter_(1, routes_TK, slot_ids_K.expand_as(routes_TK))

    @torch.no_grad()
    def _dispatched(self, rows_TK: SiteRows, slots_TE: Tensor) -> SiteRows:
        state_TK = rows_TK.state.unsqueeze(-1).expand(-1, self.shape.top_k)
        packed_TKW = replace(rows_TK, state=state_TK).packed()
        packed_PW, slot_P = self.records.dispatch(packed_TKW, slots_TE)
        rows_P = rows_TK.unpacked(packed_PW)
        # Where the trainer's router chose another expert than the rollout there is no record.
        unmatched = (slot_P < 0) & (rows_P.state == RowState.RECORDED)
        return replace(rows_P, state=rows_P.state.masked_fill(unmatched, RowState.MISSING))


@dataclass(frozen=True)
class SharedExpertInput:
    """The input of shared experts, which the rollout computes in BF16."""

    def unrounded(self, rounded_SBH: Tensor) -> Tensor:
        """Return what the rounding of the routed experts' input was given."""
        return take_unrounded_input().view_as(rounded_SBH)


@dataclass(frozen=True)
class Fc2Input:
    """The input of fc2 of one local expert, or of all of them in one grouped layer.

    local_index  the expert; None if the rows of all local experts come at once
    row_group    the ranks that share its rows, if several
    weights      fc1's and fc2's of all experts
    """

    local_index: int | None
    row_group: ProcessGroup | None
    weights: tuple[ExpertGroup, ExpertGroup]

    def round_activation(self, activation_PI: Tensor) -> Tensor:
        """Round the input of fc2, one row per token and expert slot."""
        scope = current_scope()
        rows = None if scope.expert_rows is None else scope.expert_rows.of_expert(self.local_index)
        if rows is not None and not scope.counting:
            # An activation that alone is recomputed meets the rows that its forward counted in.
            rows = replace(rows, counts=None)
        first = 0 if self.row_group is None else self.row_group.rank() * activation_PI.shape[-1]
        shared = self.row_group
        scale_P1 = None if shared is None else own_token_scale(activation_PI, shared)
        rounded_PI = round_rows(activation_PI, scale_P1, rows, first)
        if self.local_index is None:
            rounded_PI = self._exchange_weights(rounded_PI)
        return rounded_PI if scope.probs is None else learn_from_fc2_input(rounded_PI, scope.probs)

    def _exchange_weights(self, rounded_PI: Tensor) -> Tensor:
        """Have only one layer's weights in memory: fc1 is done forward, and fc2 backward."""
        fc1, fc2 = self.weights
        before_backward = (*fc2.releases(), *fc1.refills())
        for release in fc1.releases():
            release()
        return refill_before_backward(rounded_PI, before_backward)
