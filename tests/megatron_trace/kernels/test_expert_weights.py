"""All experts' weights are rounded as each alone would be, and only those that changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bridge.fp4.nvfp4 import decode_e4m3, encode_e2m1, quantize_weight
from megatron_trace.kernels.expert_weights import expand, quantize_changed, read_matrices

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


class Kept:
    """Code words of all matrices, as `quantize_changed` keeps them; at first of none."""

    def __init__(self, weights: list[Tensor], projections: int, through: torch.dtype) -> None:
        self.dtype, self.through, self.projections = weights[0].dtype, through, projections
        self.rows, self.width = weights[0].shape
        self.codes = torch.full((EXPERTS, self.rows, self.width // 2), 0x77, dtype=torch.uint8)
        self.scales = torch.full((EXPERTS, self.rows, self.width // 16), 0x38, dtype=torch.uint8)
        self.prints = torch.zeros(EXPERTS, dtype=torch.int64)
        self.amax = torch.full((EXPERTS, projections), -1, dtype=torch.int32)
        for name in ("codes", "scales", "prints", "amax"):
            setattr(self, name, getattr(self, name).to(DEVICE))

    def read(self, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        shape = (self.rows, self.width)
        return read_matrices(pointers(weights), shape, self.projections, self.dtype)

    def update(self, weights: list[Tensor], now: tuple[Tensor, Tensor] | None = None) -> None:
        quantize_changed(
            pointers(weights),
            self.dtype,
            (self.codes, self.scales),
            self.read(weights) if now is None else now,
            (self.prints, self.amax),
            self.through,
        )

    def values(self) -> Tensor:
        shape = (EXPERTS, self.rows, self.width)
        values = torch.full(shape, 9.0, dtype=self.dtype, device=DEVICE)
        expand((self.codes, self.scales), self.amax, self.through, values)
        return values


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
    kept = Kept(weights, projections, through)
    kept.update(weights)
    for mine, weight in zip(kept.values(), weights, strict=True):
        assert torch.equal(mine, expected(weight, projections, through))
    prints, amax = kept.read(weights)
    assert torch.equal(kept.prints, prints)
    assert torch.equal(kept.amax, amax)


def test_code_words_are_packed_as_the_reference_packs_them() -> None:
    weights = matrices((32, 64), torch.bfloat16)
    kept = Kept(weights, 1, torch.bfloat16)
    kept.update(weights)
    for mine, scales, weight in zip(kept.codes, kept.scales, weights, strict=True):
        reference = quantize_weight(weight)
        assert torch.equal(mine & 0xF, reference.codes_u8[:, ::2])
        assert torch.equal(mine >> 4, reference.codes_u8[:, 1::2])
        assert torch.equal(scales, reference.scales_u8)


def test_only_a_changed_matrix_is_written_again() -> None:
    weights = matrices((32, 64), torch.bfloat16)
    kept = Kept(weights, 2, torch.bfloat16)
    kept.update(weights)
    kept.codes.fill_(0x55)
    weights[1].data[31, 63] *= 1.5
    kept.update(weights)
    assert bool((kept.codes[0] == 0x55).all())
    assert bool((kept.codes[2] == 0x55).all())
    assert torch.equal(kept.values()[1], expected(weights[1], 2, torch.bfloat16))


def test_a_matrix_is_rounded_again_when_another_ranks_part_of_it_grew() -> None:
    weights = matrices((32, 64), torch.float32)
    kept = Kept(weights, 1, torch.float32)
    kept.update(weights)
    whole = torch.cat([weights[0], weights[0] * 8])
    prints, amax = kept.read(weights)
    amax[0] = whole.abs().amax().view(torch.int32)
    kept.update(weights, (prints, amax))
    assert torch.equal(kept.values()[0], quantize_weight(whole).dequantize()[:32])


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
    kept = Kept(weights, 1, torch.bfloat16)
    kept.update(weights)
    assert bool(kept.values()[0].isnan().all())
    assert bool(kept.values()[1:].isfinite().all())


def test_a_product_with_the_reciprocal_is_coded_as_the_quotient() -> None:
    """Every BF16 significand and sign, 21 binades, every positive block scale."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    x = (bits << 16).view(torch.float32)
    x = x[(x.abs() >= 2.0**-10) & (x.abs() < 2.0**11)].unsqueeze(-1)
    scale = decode_e4m3(torch.arange(1, 0x7F, dtype=torch.uint8))
    product = x * (torch.ones(()) / scale)
    rounded = ((product.view(torch.int32) + 0x80) & -256).view(torch.float32)
    assert torch.equal(encode_e2m1(rounded), encode_e2m1(x / scale))
