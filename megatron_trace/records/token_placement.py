"""Where the tokens of every sequence lie in a micro-batch, padded or packed.

Shape legend: b sequences, s padded length, t packed length, N tokens in model order, P positions
of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from bridge.errors import TraceError
from megatron_trace.parallel import ContextParallel


class PlacementError(TraceError):
    """Tokens and sequence lengths do not describe a micro-batch."""


@dataclass(frozen=True)
class TokenPlacement:
    """The tokens of a micro-batch in model order, and where each sequence's tokens are in it.

    tokens     int64 [N] on the CPU
    sequences  for each sequence, int64 [P]: the model-order place of its positions 0, 1, ...; -1
               where another context-parallel rank computes them
    batch      b of a padded batch, 1 of a packed one
    is_packed  whether the model has to be told where the sequences begin (packed_seq_params)
    bounds     where the sequences begin, padding included, and where the last one ends, before
               context parallelism splits them; of a padded batch (0, s)
    """

    tokens: Tensor
    sequences: tuple[Tensor, ...]
    batch: int
    is_packed: bool
    bounds: tuple[int, ...]

    @classmethod
    def padded(cls, tokens_bs: Tensor, lengths: Sequence[int] | Tensor | None) -> TokenPlacement:
        """Describe a right-padded batch [b, s], which the model computes as [s, b].

        Raises:
            PlacementError: if `lengths` are not b numbers between 0 and s.
        """
        if tokens_bs.dim() != 2:
            raise PlacementError(
                f"Padded tokens of shape {tuple(tokens_bs.shape)} are not [b, s]: "
                "pass cu_seqlens with packed tokens."
            )
        b, s = tokens_bs.shape
        sizes = [s] * b if lengths is None else [int(length) for length in lengths]
        if len(sizes) != b or not all(0 <= size <= s for size in sizes):
            raise PlacementError(f"Lengths {sizes} do not fit {b} sequences of {s} tokens.")
        sequences = tuple(torch.arange(size) * b + i for i, size in enumerate(sizes))
        return cls(tokens_bs.T.reshape(-1).to("cpu", torch.int64), sequences, b, False, (0, s))

    @classmethod
    def packed(
        cls,
        tokens: Tensor,
        cu_seqlens: Sequence[int] | Tensor,
        cu_seqlens_padded: Sequence[int] | Tensor | None,
    ) -> TokenPlacement:
        """Describe packed tokens [t] or [1, t] by Megatron's cumulative sequence lengths.

        Raises:
            PlacementError: if the lengths run past the tokens or are not ascending.
        """
        lengths = _differences(cu_seqlens)
        starts = [
            int(start) for start in (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)
        ]
        if any(length < 0 for length in lengths) or len(starts) != len(lengths) + 1:
            raise PlacementError(
                f"cu_seqlens {list(map(int, cu_seqlens))} and {starts} do not describe the same "
                "sequences: pass ascending lists of equal length."
            )
        if starts[-1] > tokens.numel():
            raise PlacementError(
                f"cu_seqlens end at {starts[-1]} but there are {tokens.numel()} tokens: "
                "pass the tokens of the whole pack."
            )
        sequences = tuple(
            torch.arange(start, start + length)
            for start, length in zip(starts[:-1], lengths, strict=True)
        )
        flat = tokens.reshape(-1).to("cpu", torch.int64)
        return cls(flat, sequences, 1, True, tuple(starts))

    def without_last(self) -> TokenPlacement:
        """Return the same tokens, those of the last sequence being padding."""
        return replace(self, sequences=self.sequences[:-1])

    def on_context_rank(self, context: ContextParallel) -> TokenPlacement:
        """Return the tokens that one context-parallel rank computes.

        Raises:
            UnevenContext: if a sequence does not divide into chunks.
            PlacementError: if tokens behind the last sequence belong to none.
        """
        if context.size == 1:
            return self
        if self.bounds[-1] * self.batch != len(self.tokens):
            raise PlacementError(
                f"Context parallelism splits every sequence, and {len(self.tokens)} tokens reach "
                f"beyond the last one's end, {self.bounds[-1]}: count the padding at the end as a "
                "sequence (pad_sequence=True)."
            )
        row = torch.arange(self.batch)
        kept = (context.kept(self.bounds)[:, None] * self.batch + row).reshape(-1)
        place = torch.full((len(self.tokens),), -1)
        place[kept] = torch.arange(len(kept))
        sequences = tuple(place[places_P] for places_P in self.sequences)
        return replace(self, tokens=self.tokens[kept], sequences=sequences)


def _differences(cu_seqlens: Sequence[int] | Tensor) -> list[int]:
    bounds = [int(bound) for bound in cu_seqlens]
    return [stop - start for start, stop in pairwise(bounds)]
