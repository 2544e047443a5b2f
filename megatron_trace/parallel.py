"""This rank's share of the micro-batch's tokens and of a row's values.

Shape legend: N tokens of the micro-batch in model order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bridge.errors import TraceError


class TokenCountMismatch(TraceError):
    """The model computes another number of tokens than the micro-batch describes."""


class UnevenContext(TraceError):
    """A sequence cannot be split over the context-parallel ranks."""


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel group, and whether tokens are split over it (sequence parallelism)."""

    group: ProcessGroup
    splits_tokens: bool

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    def part_of(self, size: int) -> tuple[int, int]:
        """Return which of `size` equal things that are split over the group this rank has."""
        return self.rank * size // self.size, (self.rank + 1) * size // self.size

    def tokens_of(self, num_tokens: int, computed: int) -> slice:
        """Return which of a micro-batch's N tokens a layer computes that sees `computed` of them.

        Raises:
            TokenCountMismatch: if that is neither all of them nor this rank's part.
        """
        parts = self.size if self.splits_tokens else 1
        if computed * parts != num_tokens:
            raise TokenCountMismatch(
                f"The model computes {computed * parts} tokens, the micro-batch describes "
                f"{num_tokens}: build it from the same tokens, padding included."
            )
        start = self.rank * computed if self.splits_tokens else 0
        return slice(start, start + computed)


@dataclass(frozen=True)
class ContextParallel:
    """Which of a context-parallel group's ranks this is; one of one computes all tokens."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> ContextParallel:
        """Return this rank's place in Megatron's context-parallel group; alone if there is none."""
        state = sys.modules.get("megatron.core.parallel_state")
        group = state and state.get_context_parallel_group(check_initialized=False)
        return cls(group.rank(), group.size()) if group else cls()

    def kept(self, bounds: Sequence[int]) -> Tensor:
        """Return which tokens this rank computes, in its order: int64 [tokens / size].

        Every sequence is cut into twice as many chunks as there are ranks, and rank r computes
        chunk r from the front and chunk r from the back, so that causal attention costs all ranks
        the same (Megatron-core's `get_batch_on_this_cp_rank`, Transformer Engine's
        `thd_get_partitioned_indices`).

        Args:
            bounds: where the sequences begin, padding included, and where the last one ends.

        Raises:
            UnevenContext: if a sequence does not divide into that many chunks.
        """
        return torch.cat([self._kept_of(*pair) for pair in pairwise(bounds)])

    def _kept_of(self, start: int, stop: int) -> Tensor:
        chunk, rest = divmod(stop - start, 2 * self.size)
        if rest:
            raise UnevenContext(
                f"A sequence of {stop - start} tokens does not divide into {2 * self.size} chunks "
                f"for {self.size} context-parallel ranks: pad every sequence to a multiple of "
                f"{2 * self.size} (cu_seqlens_padded in packs)."
            )
        front = start + self.rank * chunk
        back = stop - (self.rank + 1) * chunk
        return torch.cat((torch.arange(front, front + chunk), torch.arange(back, back + chunk)))
