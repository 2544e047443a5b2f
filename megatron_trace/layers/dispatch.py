"""Sending records along with dispatched tokens, through the token dispatcher's own permutation.

The records travel as bytes, not as row ids: with expert parallelism the rank that computes a row
does not hold the records of the rank it comes from. A row costs its fc2 record and one state byte,
against two bytes per value for the hidden state beside it.

Shape legend: T tokens this rank sends, G tokens gathered from every rank, K expert slots, E
experts, P rows that arrive at this rank sorted by local expert, W bytes per row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from bridge.errors import TraceError


class UnfollowedPermutation(TraceError):
    """Records of fc2 cannot follow the tokens to their experts."""


class RecordDispatcher(Protocol):
    """Takes records the way a token dispatcher has just taken the tokens."""

    @property
    def num_tokens(self) -> int:
        """T of the dispatch under way."""
        ...

    def dispatch(self, records_TKW: Tensor, slots_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records uint8 [P, W] and slots int8 [P] of the rows that arrive here.

        Args:
            records_TKW: uint8, the records of every token and expert slot.
            slots_TE: int8, the slot in which the rollout gave token t to expert e; -1: none.
        """
        ...


class AllToAllRecords:
    """The way of `MoEAlltoAllTokenDispatcher`: permute, all-to-all, gather, sort by expert."""

    def __init__(self, dispatcher: MoEAlltoAllTokenDispatcher) -> None:
        self._dispatcher = dispatcher

    @property
    def num_tokens(self) -> int:
        """T of the dispatch under way."""
        return len(self._dispatcher.routing_map)

    def dispatch(self, records_TKW: Tensor, slots_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `RecordDispatcher.dispatch`."""
        d = self._dispatcher
        rows = _pair_rows(records_TKW, slots_TE, d.routing_map, d.num_out_tokens)
        rows = all_to_all(d.ep_group, rows, d.output_splits, d.input_splits)
        if d.tp_size > 1:
            splits = None if d.output_splits_tp is None else d.output_splits_tp.tolist()
            rows = gather_from_sequence_parallel_region(
                rows, group=d.tp_group, output_split_sizes=splits
            )
        if d.num_local_experts > 1 and d.tp_size * d.ep_size > 1:
            counts = d.num_global_tokens_per_local_expert.ravel()
            rows = rows[_chunk_order(counts, d.sort_input_by_local_experts, len(rows))]
        return _records_and_slots(rows)


class AllGatherRecords:
    """The way of `MoEAllGatherTokenDispatcher`: gather all tokens, keep the local experts'."""

    def __init__(self, dispatcher: MoEAllGatherTokenDispatcher) -> None:
        self._dispatcher = dispatcher

    @property
    def num_tokens(self) -> int:
        """T of the dispatch under way."""
        return int(self._dispatcher.hidden_shape[:-1].numel())

    def dispatch(self, records_TKW: Tensor, slots_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `RecordDispatcher.dispatch`."""
        d = self._dispatcher
        records_GKW, slots_GE = records_TKW, slots_TE
        if d.tp_size > 1 or d.ep_size > 1:
            records_GKW = gather_from_sequence_parallel_region(records_TKW, group=d.tp_ep_group)
            slots_GE = gather_from_sequence_parallel_region(slots_TE, group=d.tp_ep_group)
        local = slice(d.local_expert_indices[0], d.local_expert_indices[-1] + 1)
        num_pairs = int(d.local_map.sum())  # Megatron-core waits for the same number
        rows = _pair_rows(records_GKW, slots_GE[:, local], d.local_map, num_pairs)
        return _records_and_slots(rows)


class HiddenPermutation:
    """A dispatcher such as flex (DeepEP), whose permutation happens inside another library."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def num_tokens(self) -> int:
        """Raise, as `dispatch` would."""
        raise UnfollowedPermutation(
            f"{self._name} does not show how it permutes tokens, so fc2 records cannot follow it: "
            'set moe_token_dispatcher_type="alltoall", or record and guide without fc2.'
        )

    def dispatch(self, records_TKW: Tensor, slots_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Never reached: `num_tokens` is asked for first."""
        raise AssertionError(self._name)


def _pair_rows(
    records_TKW: Tensor, slots_TE: Tensor, routing_map_TE: Tensor, num_pairs: int
) -> Tensor:
    """Return one row for each routed pair, ordered by expert, then token: uint8 [pairs, W + 1].

    That is the order of `moe_utils.permute`, fused or not. The last byte is the slot, 255 for none.
    """
    pairs = torch.nonzero_static(routing_map_TE.T, size=num_pairs)
    expert, token = pairs.unbind(-1)
    slot = slots_TE[token, expert]
    records = records_TKW[token, slot.clamp(min=0).to(torch.int64)]
    return torch.cat((records, slot.view(torch.uint8).unsqueeze(-1)), dim=-1)


def _chunk_order(counts_C: Tensor, order_C: Tensor, rows: int) -> Tensor:
    """Return which row comes next when chunks of rows are put into an order: int64 [rows].

    As `moe_utils.sort_chunks_by_idxs`, fused or not, without waiting for the counts on a GPU.

    Args:
        counts_C: int64 [C], rows in each chunk, on any device.
        order_C: int64 [C], the chunks in their new order.
        rows: the sum of the counts.
    """
    device = order_C.device
    counts_C = counts_C.to(device, non_blocking=True)
    old_starts_C = (counts_C.cumsum(0) - counts_C)[order_C]
    moved_C = counts_C[order_C]
    shifts_C = old_starts_C - (moved_C.cumsum(0) - moved_C)
    shift_P = torch.repeat_interleave(shifts_C, moved_C, output_size=rows)
    return torch.arange(rows, device=device) + shift_P


def _records_and_slots(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1], rows[:, -1].contiguous().view(torch.int8)
