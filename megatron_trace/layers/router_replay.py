"""Routing replay from the recorded expert ids.

Megatron's router asks its `router_replay` object for the top-k; this one answers from the running
forward's micro-batch, so there is no queue to keep in step with pipeline schedules and
recomputation. Only the choice is replayed: the probabilities are the trainer's own scores at the
recorded ids, with their gradient.

Megatron's auxiliary losses are computed from the trainer's own choice, which never comes here.
Padding has no record and follows the trainer's own choice: equal pad tokens all go to one set of
experts.

Shape legend: T tokens this rank computes, E experts, K expert slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bridge.layout import ModelShape, Site
from megatron_trace.context import current_scope, never_compiled
from megatron_trace.parallel import TensorParallel
from megatron_trace.rounding.rows import Counter, RowState

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class RecordedRoutes:
    """The router replay of MoE layer `layer` (stands where Megatron keeps a `RouterReplay`)."""

    layer: int
    shape: ModelShape
    tokens: TensorParallel
    layer_number: int | None = None  # set by Megatron's router

    @never_compiled
    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and ids [T, K]: the recorded ids where there are some, else the top-k."""
        assert default_compute_topk is not None
        own = default_compute_topk(scores_TE, topk, num_groups, group_topk)
        scope = current_scope()
        micro_batch = scope.micro_batch
        if micro_batch is None or not micro_batch.replays_routes:
            return own
        micro_batch.check_shape(self.shape)
        tokens = self.tokens.tokens_of(micro_batch.num_tokens, len(scores_TE))
        state_T1 = micro_batch.rows.forward_state[tokens].unsqueeze(-1)
        recorded_TK = micro_batch.routes(self.layer, tokens)
        ids_TK = torch.where(state_T1 == RowState.RECORDED, recorded_TK, own[1])
        if scope.counting:
            _count(micro_batch.counts(Site.ROUTES, self.layer)[0], state_T1, recorded_TK, own[1])
        return scores_TE.gather(1, ids_TK), ids_TK


def _count(counts: Tensor, state_T1: Tensor, recorded_TK: Tensor, own_TK: Tensor) -> None:
    """Count replayed slots, and how many of them the trainer's own router would have chosen."""
    known_T1 = state_T1 == RowState.RECORDED
    top_k = recorded_TK.shape[-1]
    chosen_TK = (recorded_TK.unsqueeze(-1) == own_TK.unsqueeze(-2)).any(-1)
    same = (known_T1 & chosen_TK).sum()
    counts[Counter.GUIDED] += known_T1.sum() * top_k
    counts[Counter.MISSING] += (state_T1 == RowState.MISSING).sum() * top_k
    counts[Counter.COMPARED] += known_T1.sum() * top_k
    counts[Counter.AGREE_USED] += known_T1.sum() * top_k
    counts[Counter.AGREE_NEAREST] += same
