"""Straight-through weights for layers that write gradients to a parameter's `main_grad`.

With gradient accumulation fusion a linear layer's backward adds to `weight.main_grad` and sets
`weight.grad_added_to_main_grad`, by which Megatron's gradient buffers know it. The rounded weight
that the layer is given must carry both to the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# What Transformer Engine and Megatron-core read from a weight in a fused backward.
_MARKS = ("main_grad", "grad_added_to_main_grad", "zero_out_wgrad", "overwrite_main_grad")


def straight_through_all(
    parameters: Sequence[Tensor], rounded: Sequence[Tensor], *, fuses_grads: bool
) -> list[Tensor]:
    """Return exactly the ``rounded`` tensors, whose gradients flow to the parameters unchanged.

    Args:
        parameters: of one dtype; what is not trained gets no gradient.
        rounded: as many, of the same shapes and dtype, each a view or tensor made for this call.
        fuses_grads: whether the backward of the layer that uses them adds to `main_grad` itself.
    """
    through = _StraightThroughAll.apply(list(rounded), fuses_grads, *parameters)  # type: ignore[no-untyped-call]
    if fuses_grads:
        for parameter, weight in zip(parameters, through, strict=True):
            for mark in _MARKS:
                if hasattr(parameter, mark):
                    setattr(weight, mark, getattr(parameter, mark))
    return list(through)


class _StraightThroughAll(torch.autograd.Function):
    """Identity in the list forward, in the parameters backward."""

    @staticmethod
    def forward(
        ctx: Any, rounded: list[Tensor], fuses_grads: bool, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.parameters = parameters if fuses_grads else ()
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        for parameter in ctx.parameters:
            # The layer has set it on the rounded weight, in the backward that ends here.
            if parameter.requires_grad and hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True
        return None, None, *grads
