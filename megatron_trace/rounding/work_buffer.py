"""BF16 memory into which the FP4 weights of one layer after the other are expanded.

A grouped GEMM reads whole BF16 matrices, but only one layer computes at a time. All layers of one
shape therefore share one buffer: it is filled before a layer's forward and once more before its
backward, which costs a pass over the layer's weights and saves a BF16 copy of all layers. In
between it gives its memory back.

Kernels fill the buffer through its address, so autograd takes what a forward has saved of it for
unchanged; `refill_before_backward` makes that true.

Shape legend: E experts, O, I rows and columns of one weight (this rank's part), T tokens, P rows
dispatched to this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class WorkBuffer:
    """Memory [E, O, I] for the expanded weights of one layer at a time, and whose they are."""

    values_EOI: Tensor
    _owner: object = field(default=None, init=False)

    def fill(self, owner: object, expand: Callable[[Tensor], None]) -> None:
        """Have the buffer hold what ``expand`` writes; the same ``owner`` writes the same."""
        if self._owner is not owner:
            self._storage.resize_(self._nbytes)
            expand(self.values_EOI)
            self._owner = owner

    def release(self) -> None:
        """Give the memory back until the next `fill`; what was saved of the buffer stays valid."""
        self._storage.resize_(0)
        self._owner = None

    @property
    def nbytes(self) -> int:
        """The memory that the buffer takes at the moment."""
        return self._storage.nbytes()

    @property
    def _nbytes(self) -> int:
        return self.values_EOI.numel() * self.values_EOI.element_size()

    @property
    def _storage(self) -> torch.UntypedStorage:
        return self.values_EOI.untyped_storage()


_Key = tuple[torch.device, torch.cuda.Stream, torch.dtype, tuple[int, ...]]
_buffers: dict[_Key, WorkBuffer] = {}


def work_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> WorkBuffer:
    """Return the buffer of the current stream for this shape; work on one stream is in order."""
    key = (device, torch.cuda.current_stream(device), dtype, shape)
    if key not in _buffers:
        _buffers[key] = WorkBuffer(torch.empty(shape, dtype=dtype, device=device))
    return _buffers[key]


def free_work_buffers() -> int:
    """Let go of all buffers; return their bytes. A backward to come keeps the one it needs."""
    freed = sum(buffer.nbytes for buffer in _buffers.values())
    _buffers.clear()
    return freed


def release_work_buffers() -> None:
    """Give the memory of all buffers back until a layer needs them again."""
    for buffer in _buffers.values():
        buffer.release()


def refill_before_backward(output_PH: Tensor, refills: tuple[Callable[[], None], ...]) -> Tensor:
    """Return the experts' output; its backward first calls ``refills``, then the experts'."""
    if not refills:
        return output_PH
    passed: Tensor = _Refill.apply(output_PH, refills)  # type: ignore[no-untyped-call]
    return passed


def release_after_backward(input_TH: Tensor) -> Tensor:
    """Return the experts' input; when its gradient has come, no expert needs its weights."""
    passed: Tensor = _Release.apply(input_TH)  # type: ignore[no-untyped-call]
    return passed


class _Release(torch.autograd.Function):
    """Identity, with buffers to release when the gradient has come."""

    @staticmethod
    def forward(ctx: Any, input_TH: Tensor) -> Tensor:
        return input_TH.view_as(input_TH)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> Tensor:
        release_work_buffers()
        return grad_TH


class _Refill(torch.autograd.Function):
    """Identity, with work to do before the gradient goes on."""

    @staticmethod
    def forward(ctx: Any, output_PH: Tensor, refills: tuple[Callable[[], None], ...]) -> Tensor:
        ctx.refills = refills
        return output_PH.view_as(output_PH)

    @staticmethod
    def backward(ctx: Any, grad_PH: Tensor) -> tuple[Tensor, None]:
        for refill in ctx.refills:
            refill()
        return grad_PH, None
