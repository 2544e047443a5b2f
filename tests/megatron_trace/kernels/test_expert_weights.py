"""All experts' weights are rounded as each alone would be, and only those that changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bridge.fp4.nvfp4 import quantize_weight
from megatron_trace.kernels.expert_weights import read_matrices, round_changed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = 3


def matrices(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (1e-6, 1.0, 300.0)
    made = [torch.randn(shape, generator=generator) * size for size in sizes]
    made[1][:2] = 0
    return [each.to(dtype).to(DEVICE) for each in made]


def pointers(weights: list[Tensor]) -> Tensor:
    return torch.tensor([each.data_ptr() for each in weights], dtype=torch.int64, device=DEVICE)


def empty(weights: list[Tensor], projections: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Room for rounded matrices, and what says that it holds none."""
    rounded = torch.full((EXPERTS, *weights[0].shape), 7.0, dtype=weights[0].dtype, device=DEVICE)
    prints = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    return rounded, (prints, torch.full((EXPERTS, projections), -1, dtype=torch.int32).to(DEVICE))


def expected(weight: Tensor, projections: int, through: torch.dtype) -> Tensor:
    parts = [quantize_weight(part) for part in weight.to(through).chunk(projections)]
    return torch.cat([part.dequantize(weight.dtype) for part in parts])


@pytest.mark.parametrize("shape", [(64, 48), (6, 272), (32, 16)])
@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "through"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_every_expert_gets_the_rollouts_rounding(
    shape: tuple[int, int], projections: int, dtype: torch.dtype, through: torch.dtype
) -> None:
    weights = matrices(shape, dtype)
    rounded, kept = empty(weights, projections)
    at = pointers(weights)
    now = read_matrices(at, shape, projections, dtype)
    round_changed(at, rounded, now, kept, through)
    for mine, weight in zip(rounded, weights, strict=True):
        assert torch.equal(mine, expected(weight, projections, through))
    assert torch.equal(kept[0], now[0])
    assert torch.equal(kept[1], now[1])


def test_only_a_changed_matrix_is_written_again() -> None:
    weights = matrices((32, 64), torch.bfloat16)
    rounded, kept = empty(weights, 2)
    at = pointers(weights)
    round_changed(at, rounded, read_matrices(at, (32, 64), 2, torch.bfloat16), kept, torch.bfloat16)
    rounded.fill_(5.0)
    weights[1].data[31, 63] *= 1.5
    round_changed(at, rounded, read_matrices(at, (32, 64), 2, torch.bfloat16), kept, torch.bfloat16)
    assert bool((rounded[0] == 5.0).all())
    assert bool((rounded[2] == 5.0).all())
    assert torch.equal(rounded[1], expected(weights[1], 2, torch.bfloat16))


def test_a_matrix_is_rounded_again_when_another_ranks_part_of_it_grew() -> None:
    weights = matrices((32, 64), torch.float32)
    rounded, kept = empty(weights, 1)
    at = pointers(weights)
    prints, amax = read_matrices(at, (32, 64), 1, torch.float32)
    round_changed(at, rounded, (prints, amax), kept, torch.float32)
    whole = torch.cat([weights[0], weights[0] * 8])
    grown = amax.clone()
    grown[0] = whole.abs().amax().view(torch.int32)
    round_changed(at, rounded, (prints, grown), kept, torch.float32)
    assert torch.equal(rounded[0], quantize_weight(whole).dequantize()[:32])


@pytest.mark.parametrize("change", ["one value", "two values swapped", "sign of a zero", "rows"])
def test_a_fingerprint_changes_with_what_a_matrix_holds(change: str) -> None:
    (weight,) = matrices((16, 32), torch.bfloat16)[2:]
    other = weight.clone()
    match change:
        case "one value":
            other.view(torch.int16)[15, 31] ^= 1
        case "two values swapped":
            other[3, 4], other[3, 5] = weight[3, 5], weight[3, 4]
        case "sign of a zero":
            weight[0, 0], other[0, 0] = 0.0, -0.0
        case "rows":
            other[[0, 9]] = weight[[9, 0]]
    prints = [
        int(read_matrices(pointers([each]), (16, 32), 1, torch.bfloat16)[0])
        for each in (weight, other, weight)
    ]
    assert prints[0] != prints[1]
    assert prints[0] == prints[2]


def test_a_matrix_with_nan_is_nan_throughout() -> None:
    weights = matrices((16, 32), torch.bfloat16)
    weights[0][3, 3] = torch.nan
    rounded, kept = empty(weights, 1)
    at = pointers(weights)
    round_changed(at, rounded, read_matrices(at, (16, 32), 1, torch.bfloat16), kept, torch.bfloat16)
    assert bool(rounded[0].isnan().all())
    assert bool(rounded[1:].isfinite().all())
