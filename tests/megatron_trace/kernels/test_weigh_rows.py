"""Weighing rows is exact, and the probabilities' gradient is that of the plain formula."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.kernels.weigh_rows import dot_rows, scale_rows
from megatron_trace.layers.weighing import learn_from_fc2_input, weigh, weigh_without_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("probs_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 48), (3, 640), (0, 32)])
def test_rows_are_weighed_bit_for_bit_as_by_torch(
    dtype: torch.dtype, probs_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape, device=DEVICE).to(dtype)
    probs = torch.rand(shape[0], device=DEVICE).to(probs_dtype)
    assert torch.equal(scale_rows(x, probs), weigh(x, probs))


def test_a_row_without_probability_has_no_gradient() -> None:
    x = torch.ones(2, 16, device=DEVICE)
    dot = dot_rows(x, 3 * x, torch.tensor([0.5, 0.0], device=DEVICE))
    assert dot.tolist() == [96.0, 0.0]


def test_gradients_are_those_of_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    a, weight = torch.randn(7, 64, generator=generator), torch.randn(32, 64, generator=generator)
    probs = torch.rand(7, generator=generator)
    upstream = torch.randn(7, 32, generator=generator).to(DEVICE)

    def gradients(split: bool) -> list[torch.Tensor]:
        leaves = [t.to(DEVICE).requires_grad_() for t in (a, weight, probs)]
        rows, matrix, p = leaves
        if split:
            out = weigh_without_gradient(learn_from_fc2_input(rows, p) @ matrix.T, p)
        else:
            out = weigh(rows @ matrix.T, p)
        return list(torch.autograd.grad(out, leaves, upstream))

    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)
