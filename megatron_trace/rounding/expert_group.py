"""The weights of all experts of a layer in FP4 on a GPU, kept until a weight changes.

The device itself compares fingerprints, so no forward waits for it. `KeptRounding` does the same
for one weight on a CPU, in the weight's own dtype.

Shape legend: E experts, O, I rows and columns of one weight (this rank's part), P projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.optim.optimizer import register_optimizer_step_post_hook

from bridge.errors import TraceError
from bridge.fp4.nvfp4 import NVFP4_BLOCK
from megatron_trace.rounding.rows import KERNEL_DTYPES
from megatron_trace.rounding.work_buffer import WorkBuffer, free_work_buffers, work_buffer

# The kernels read parameters in words of so many bytes.
_WORD = 8

_all_groups: WeakSet[ExpertGroup] = WeakSet()


class UnreadableWeights(TraceError):
    """The parameters of experts lie in memory as no kernel reads them."""


@dataclass
class _Kept:
    """Code words of all weights, and what they are of.

    addresses, stream    of the parameters, and where the work on them is in order
    codes_u8, scales_u8  two code words a byte [E, O, I / 2], E4M3 block scales [E, O, I / 16]
    prints_E, amax_EP    fingerprints int64 and bits of the largest magnitudes int32
    reading              a new object whenever the parameters are read: the codes may be new
    """

    addresses: tuple[int, ...]
    stream: torch.cuda.Stream
    pointers_E: Tensor
    codes_u8: Tensor
    scales_u8: Tensor
    prints_E: Tensor
    amax_EP: Tensor
    rollout_dtype: torch.dtype
    reading: object = None

    @property
    def nbytes(self) -> int:
        return self.codes_u8.nbytes + self.scales_u8.nbytes

    def expand_into(self, buffer: WorkBuffer) -> None:
        """Have the buffer hold the weights' values; nothing happens if it holds them."""
        buffer.fill(self.reading, self._expand)

    def _expand(self, values_EOI: Tensor) -> None:
        from megatron_trace.kernels.expert_weights import expand

        expand((self.codes_u8, self.scales_u8), self.amax_EP, self.rollout_dtype, values_EOI)


@dataclass(eq=False)
class ExpertGroup:
    """One linear layer of all local experts; every weight has the same shape and dtype.

    A forward that is in flight needs these very weights for its backward. An optimizer step
    frees them here, so the next forward makes new ones and the old stay with that backward. A
    weight that is changed otherwise is quantized in place by the next forward; a backward that is
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

    @property
    def kept_bytes(self) -> int:
        """How many bytes the rounded weights take from a forward to the next optimizer step."""
        if not self.takes(self.weights[0], 0):
            return sum(weight.nbytes for weight in self.weights)
        return sum(weight.numel() // 2 + weight.numel() // NVFP4_BLOCK for weight in self.weights)

    def begin_forward(self) -> None:
        """Have the next use look whether a weight has changed."""
        self._is_fresh = False

    def rounded(self) -> Tensor:
        """Return all weights as the rollout computes with them, [E, O, I].

        They are good until another layer's weights are asked for, and in a backward that
        `refills` has prepared.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self._kept is None or not self._is_fresh:
                self._kept = self._read()
                self._is_fresh = True
            buffer = self._buffer()
            self._kept.expand_into(buffer)
        return buffer.values_EOI

    def refills(self) -> tuple[Callable[[], None], ...]:
        """Return what a backward of this forward must call first; nothing if none was rounded."""
        if self._kept is None or not self._is_fresh:
            return ()
        return (partial(self._kept.expand_into, self._buffer()),)

    def releases(self) -> tuple[Callable[[], None], ...]:
        """Return what gives the memory of this forward's weights back, until they are needed."""
        if self._kept is None or not self._is_fresh:
            return ()
        return (self._buffer().release,)

    def _are_contiguous(self) -> bool:
        return all(weight.is_contiguous() for weight in self.weights)

    def free(self) -> int:
        """Let go of the code words; return the bytes that they took."""
        kept, self._kept, self._is_fresh = self._kept, None, False
        return 0 if kept is None else kept.nbytes

    def _buffer(self) -> WorkBuffer:
        first = self.weights[0]
        return work_buffer((len(self.weights), *first.shape), first.dtype, first.device)

    def _read(self) -> _Kept:
        from megatron_trace.kernels.expert_weights import quantize_changed, read_matrices

        kept = self._room()
        first = self.weights[0]
        shape = (first.shape[0], first.shape[1])
        now = read_matrices(kept.pointers_E, shape, self.projections, first.dtype)
        if self.shard_group is not None:
            # The bits sort as the magnitudes do.
            all_reduce(now[1], ReduceOp.MAX, self.shard_group)
        quantize_changed(
            kept.pointers_E,
            first.dtype,
            (kept.codes_u8, kept.scales_u8),
            now,
            (kept.prints_E, kept.amax_EP),
            self.rollout_dtype,
        )
        kept.reading = object()
        return kept

    def _room(self) -> _Kept:
        """Return the code words kept, or room for them if the parameters lie elsewhere now."""
        addresses = tuple(weight.data_ptr() for weight in self.weights)
        # Only work on the stream that quantized them is ordered after it.
        stream = torch.cuda.current_stream()
        kept = self._kept
        if kept is not None and (kept.addresses, kept.stream) == (addresses, stream):
            return kept
        if any(address % _WORD for address in addresses) or not self._are_contiguous():
            raise UnreadableWeights(
                "An expert's weight is not contiguous or does not begin at a multiple of "
                f"{_WORD} bytes, so the kernels cannot read it: give every expert's weight memory "
                "of its own, or pad the buffer that holds them."
            )
        experts, (rows, width), device = len(addresses), self.weights[0].shape, stream.device
        pointers_E = torch.tensor(addresses, dtype=torch.int64).pin_memory()
        bytes_of = partial(torch.empty, dtype=torch.uint8, device=device)
        return _Kept(
            addresses,
            stream,
            pointers_E.to(device, non_blocking=True),
            bytes_of((experts, rows, width // 2)),
            bytes_of((experts, rows, width // NVFP4_BLOCK)),
            torch.zeros(experts, dtype=torch.int64, device=device),
            # No magnitude has these bits, so every weight counts as changed.
            torch.full((experts, self.projections), -1, dtype=torch.int32, device=device),
            self.rollout_dtype,
        )


def free_rounded(groups: Sequence[ExpertGroup]) -> int:
    """Free what groups keep, and the buffers that all layers share; return the bytes."""
    return sum(group.free() for group in groups) + free_work_buffers()


def _free_all(*_: Any) -> None:
    free_rounded(list(_all_groups))


# A step changes the weights, so memory that the next forward would free is free before it.
register_optimizer_step_post_hook(_free_all)
