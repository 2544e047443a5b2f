"""What the model is given, compared with what the micro-batch describes.

Records guide by position, so a forward over other tokens, another order or another form would
follow records that are not its own and report them as followed. The tokens are compared where the
model embeds them, and on later pipeline stages where they are passed; shape and sequence bounds are
compared in the first layer of every stage.

A GPU is not waited for: what it finds is copied to pinned memory and read when `guide` ends.

Shape legend: b sequences, s padded length, N tokens in model order, k sequences of a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bridge.errors import TokenMismatch, TraceError
from megatron_trace.parallel import TokenCountMismatch
from megatron_trace.records.token_placement import TokenPlacement


class FormMismatch(TraceError):
    """The model computes the micro-batch's tokens in another form: padded, packed or cut apart."""


@dataclass(frozen=True)
class _Pending:
    """What a GPU will have found once `event` is reached: bool [] in pinned memory."""

    found: Tensor
    event: torch.cuda.Event
    error: Callable[[], TraceError]


class ForwardCheck:
    """Compares one micro-batch with the forwards that run under it.

    Raises, from every method on a CPU and from `settle` for a GPU:
        TokenMismatch: if the model is given other tokens, or the same in another order.
        TokenCountMismatch: if it computes another number of tokens.
        FormMismatch: if sequences are padded instead of packed, packed otherwise, or the reverse.
    """

    def __init__(self, placement: TokenPlacement, device: torch.device) -> None:
        self._batch = placement.batch
        self._is_packed = placement.is_packed
        self._num_tokens = len(placement.tokens)
        real_N = torch.zeros(self._num_tokens, dtype=torch.bool)
        for places_P in placement.sequences:
            real_N[places_P[places_P >= 0]] = True
        self._tokens_N = placement.tokens.to(device)
        # What stands in the padding is the caller's choice: no record guides there.
        self._real_N = real_N.to(device)
        lengths = [len(places_P) for places_P in placement.sequences]
        # Of a pack; where a padded batch's sequences begin is not asked for.
        starts = placement.bounds[: len(lengths)]
        self._lengths_k = torch.tensor(lengths, dtype=torch.int64, device=device)
        self._starts_k = torch.tensor(starts, dtype=torch.int64, device=device)
        self._checked_params: Any = None
        self._pending: list[_Pending] = []

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what lies on the device."""
        return self._tokens_N, self._real_N, self._lengths_k, self._starts_k

    def check_tokens(self, input_ids: Tensor) -> None:
        """Compare the token ids that the model embeds: [b, s], or packed [1, t]."""
        if input_ids.numel() != self._num_tokens:
            raise self._other_count(input_ids.numel())
        if input_ids.dim() == 2 and len(input_ids) != self._batch:
            raise self._other_batch(len(input_ids))
        given_N = input_ids.reshape(self._batch, -1).T.reshape(-1)
        differs_N = (given_N != self._tokens_N) & self._real_N

        def error() -> TraceError:
            place = int(differs_N.nonzero()[0])
            return TokenMismatch(
                f"The model is given token {int(given_N[place])} at place {place} of the "
                f"micro-batch, which was built with {int(self._tokens_N[place])}: pass the model "
                "the same sequences in the same order as the records."
            )

        self._refuse_if(differs_N.any(), error)

    def check_form(self, hidden_SBH: Tensor, packed_seq_params: Any, parts: int) -> None:
        """Compare shape and sequence bounds; `parts` are the ranks that share the tokens."""
        tokens, batch = hidden_SBH.shape[0] * parts, hidden_SBH.shape[1]
        if tokens * batch != self._num_tokens:
            raise self._other_count(tokens * batch)
        if batch != self._batch:
            raise self._other_batch(batch)
        if packed_seq_params is None:
            if self._is_packed and len(self._starts_k) > 1:
                raise FormMismatch(
                    f"The micro-batch packs {len(self._starts_k)} sequences and the forward got no "
                    "packed_seq_params, so they would attend to each other: pass the "
                    "PackedSeqParams of the same cu_seqlens."
                )
        elif not self._is_packed:
            raise FormMismatch(
                "The forward got packed_seq_params and the micro-batch describes a padded batch: "
                "build it from the packed tokens with cu_seqlens."
            )
        elif packed_seq_params is not self._checked_params:
            for side in ("q", "kv"):
                self._check_bounds(packed_seq_params, side)
            self._checked_params = packed_seq_params  # the same in all layers

    def settle(self) -> None:
        """Raise what the GPU found in the forwards since the last call."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.event.synchronize()
            if bool(each.found):
                raise each.error()

    def _check_bounds(self, params: Any, side: str) -> None:
        """Refuse other sequence bounds; further sequences behind ours hold padding alone."""
        real = getattr(params, f"cu_seqlens_{side}")
        padded = getattr(params, f"cu_seqlens_{side}_padded", None)
        bounds = real if padded is None else padded
        count = len(self._starts_k)
        if real is None or min(len(real), len(bounds)) < count + 1:
            raise self._other_bounds(bounds)
        there_k = self._lengths_k > 0
        moved_k = bounds[:count].to(self._starts_k) != self._starts_k
        # Where padding counts as part of its sequence, the model's lengths are the larger ones.
        cut_k = real[: count + 1].to(self._lengths_k).diff() < self._lengths_k
        self._refuse_if((there_k & (moved_k | cut_k)).any(), lambda: self._other_bounds(bounds))

    def _refuse_if(self, found: Tensor, error: Callable[[], TraceError]) -> None:
        if not found.is_cuda:
            if bool(found):
                raise error()
            return
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(found, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append(_Pending(host, event, error))

    def _other_count(self, computed: int) -> TokenCountMismatch:
        return TokenCountMismatch(
            f"The model computes {computed} tokens, the micro-batch describes "
            f"{self._num_tokens}: build it from the same tokens, padding included."
        )

    def _other_batch(self, batch: int) -> FormMismatch:
        return FormMismatch(
            f"The model computes {batch} sequences side by side and the micro-batch describes "
            f"{self._batch}: build it from the tokens in the shape in which the model gets them."
        )

    def _other_bounds(self, bounds: Tensor | None) -> FormMismatch:
        ours = [*zip(self._starts_k.tolist(), self._lengths_k.tolist(), strict=True)]
        theirs = None if bounds is None else bounds.tolist()
        return FormMismatch(
            f"packed_seq_params has the sequence bounds {theirs} and the micro-batch "
            f"sequences of (start, length) {ours}: pass the same cu_seqlens to both."
        )
