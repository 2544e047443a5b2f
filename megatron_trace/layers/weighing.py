"""The router's probabilities, multiplied in after fc2 as the rollout does.

y = p * (W a). The gradient of p is g . (W a), so autograd would keep every output of fc2, which
Megatron's own order (W (p a)) does not need. It is also a . (W^T p g) / p: the input of fc2 and its
gradient, which exist anyway. Where all rows pass at once `learn_from_fc2_input` takes it from
there, and nothing more is kept.

Shape legend: P rows dispatched to this rank, H hidden size, I intermediate size (this rank's part).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def weigh(output_PH: Tensor, probs_P: Tensor) -> Tensor:
    """Return the outputs times their probabilities, in the outputs' dtype."""
    return (output_PH * probs_P.unsqueeze(-1)).to(output_PH.dtype)


def weigh_without_gradient(output_PH: Tensor, probs_P: Tensor) -> Tensor:
    """As `weigh` on a GPU, for probabilities that `learn_from_fc2_input` gives their gradient."""
    weighed: Tensor = _Weigh.apply(output_PH, probs_P.detach())  # type: ignore[no-untyped-call]
    return weighed


def learn_from_fc2_input(input_PI: Tensor, probs_P: Tensor) -> Tensor:
    """Return the input of fc2; its gradient is also made into that of the probabilities."""
    passed: Tensor = _Learn.apply(input_PI, probs_P)  # type: ignore[no-untyped-call]
    return passed


class _Weigh(torch.autograd.Function):
    """p * x in the rows' dtype, rounded once."""

    @staticmethod
    def forward(ctx: Any, output_PH: Tensor, probs_P: Tensor) -> Tensor:
        from megatron_trace.kernels.weigh_rows import scale_rows

        ctx.save_for_backward(probs_P)
        return scale_rows(output_PH.contiguous(), probs_P)

    @staticmethod
    def backward(ctx: Any, grad_PH: Tensor) -> tuple[Tensor, None]:
        from megatron_trace.kernels.weigh_rows import scale_rows

        (probs_P,) = ctx.saved_tensors
        return scale_rows(grad_PH.contiguous(), probs_P), None


class _Learn(torch.autograd.Function):
    """Identity in the input; a . da / p for the probabilities."""

    @staticmethod
    def forward(ctx: Any, input_PI: Tensor, probs_P: Tensor) -> Tensor:
        ctx.save_for_backward(input_PI, probs_P)
        return input_PI.view_as(input_PI)

    @staticmethod
    def backward(ctx: Any, grad_PI: Tensor) -> tuple[Tensor, Tensor]:
        from megatron_trace.kernels.weigh_rows import dot_rows

        input_PI, probs_P = ctx.saved_tensors
        grad_P = dot_rows(input_PI.contiguous(), grad_PI.contiguous(), probs_P)
        return grad_PI, grad_P.to(probs_P.dtype)
