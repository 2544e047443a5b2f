"""Rounded weights of all experts of a layer on a GPU, kept until a weight changes.

The device itself compares fingerprints, so no forward waits for it. `KeptRounding` does the same
for one weight on a CPU.

Shape legend: E experts, O, I rows and columns of one weight (this rank's part), P projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_trace.rounding.rows import KERNEL_DTYPES

_all_groups: WeakSet[ExpertGroup] = WeakSet()


@dataclass(frozen=True)
class _Kept:
    """What the rounded weights are of: addresses int64 [E], fingerprints int64 [E], magnitudes."""

    addresses: tuple[int, ...]
    stream: torch.cuda.Stream
    pointers_E: Tensor
    rounded_EOI: Tensor
    prints_E: Tensor
    amax_EP: Tensor


@dataclass(eq=False)
class ExpertGroup:
    """One linear layer of all local experts; every weight has the same shape and dtype.

    A forward that is in flight has saved these very weights for its backward. An optimizer step
    frees them here, so the next forward makes new ones and the old stay with that backward. A
    weight that is changed otherwise is rounded in place by the next forward; a backward that is
    still to come would multiply with the new weight, as it would without FP4.

    weights        the parameters, one per expert
    projections    matrices stacked along the rows, each with a tensor scale of its own
    rollout_dtype  the dtype in which the rollout holds the weights before it quantizes them
    shard_group    the ranks that share every matrix; None if this rank holds all of it
    """

    weights: Sequence[Tensor]
    projections: int
    rollout_dtype: torch.dtype
    shard_group: ProcessGroup | None
    _kept: _Kept | None = field(default=None, init=False)
    _is_fresh: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        _all_groups.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copied or saved model needs: it rounds its own weights."""
        return {**self.__dict__, "_kept": None, "_is_fresh": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy that is known to the optimizer's hook too."""
        self.__dict__.update(state)
        _all_groups.add(self)

    def takes(self, weight: Tensor, index: int) -> bool:
        """Whether a weight is the group's number ``index``, and where kernels can round it."""
        return weight is self.weights[index] and weight.is_cuda and weight.dtype in KERNEL_DTYPES

    def begin_forward(self) -> None:
        """Have the next use look whether a weight has changed."""
        self._is_fresh = False

    def rounded(self) -> Tensor:
        """Return all weights as the rollout computes with them: [E, O, I]."""
        if self._kept is None or not self._is_fresh:
            with torch.inference_mode(False), torch.no_grad():
                self._kept = self._refreshed()
            self._is_fresh = True
        return self._kept.rounded_EOI

    def free(self) -> int:
        """Let go of the rounded weights; return the bytes that they took."""
        kept, self._kept, self._is_fresh = self._kept, None, False
        return 0 if kept is None else kept.rounded_EOI.nbytes

    def _refreshed(self) -> _Kept:
        from megatron_trace.kernels.expert_weights import read_matrices, round_changed

        kept = self._room()
        first = self.weights[0]
        shape = (first.shape[0], first.shape[1])
        now = read_matrices(kept.pointers_E, shape, self.projections, first.dtype)
        if self.shard_group is not None:
            # The bits sort as the magnitudes do.
            all_reduce(now[1], ReduceOp.MAX, self.shard_group)
        round_changed(
            kept.pointers_E,
            kept.rounded_EOI,
            now,
            (kept.prints_E, kept.amax_EP),
            self.rollout_dtype,
        )
        return kept

    def _room(self) -> _Kept:
        """Return the weights kept, or room for them if the parameters lie elsewhere now."""
        addresses = tuple(weight.data_ptr() for weight in self.weights)
        # Only work on the stream that rounded them is ordered after the rounding.
        stream = torch.cuda.current_stream()
        kept = self._kept
        if kept is not None and (kept.addresses, kept.stream) == (addresses, stream):
            return kept
        first, experts = self.weights[0], len(self.weights)
        assert all(weight.is_contiguous() for weight in self.weights)
        pointers_E = torch.tensor(addresses, dtype=torch.int64).pin_memory()
        return _Kept(
            addresses,
            stream,
            pointers_E.to(first.device, non_blocking=True),
            torch.empty((experts, *first.shape), dtype=first.dtype, device=first.device),
            torch.zeros(experts, dtype=torch.int64, device=first.device),
            # No magnitude has these bits, so every weight counts as changed.
            torch.full((experts, self.projections), -1, dtype=torch.int32, device=first.device),
        )


def _free_all(*_: Any) -> None:
    for group in list(_all_groups):
        group.free()


# A step changes the weights, so memory that the next forward would free is free before it.
register_optimizer_step_post_hook(_free_all)
