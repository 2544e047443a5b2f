"""The fingerprint of a quantized tensor: known answers, and that every part of it counts."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from bridge.fp4.digest import digest, digest_packed
from bridge.fp4.nvfp4 import E2M1_MAGNITUDES, Fp4Tensor, pack_nibbles, quantize_weight

EVERY_CODE = [*E2M1_MAGNITUDES, *(-magnitude for magnitude in E2M1_MAGNITUDES)]
# A row of every code word at scale 1, and a row of sixes at scale 1/4; the tensor's scale is 2^-8,
# so that the block scales are 256 and 64.
WEIGHT = torch.tensor([EVERY_CODE, [1.5] * 16])
CODES, SCALES, GLOBAL = "1032547698badcfe" + 8 * "77", "7868", "0000803b"
KNOWN = "4659040028fe2a6a4344dd2849a4122ad1da8050c1a224414c9c58a4a63e29ae"


@pytest.fixture
def tensor() -> Fp4Tensor:
    return quantize_weight(WEIGHT)


def test_a_weight_whose_digest_was_derived_by_hand(tensor: Fp4Tensor) -> None:
    assert hashlib.sha256(bytes.fromhex(CODES + SCALES + GLOBAL)).hexdigest() == KNOWN
    assert digest(tensor) == KNOWN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_that_a_weight_came_in_does_not_matter(dtype: torch.dtype) -> None:
    assert digest(quantize_weight(WEIGHT.to(dtype))) == KNOWN


@pytest.mark.parametrize(
    ("part", "place"),
    [*(("codes_u8", at) for at in range(32)), ("scales_u8", 0), ("scales_u8", 1)],
)
def test_every_code_word_and_block_scale_counts(tensor: Fp4Tensor, part: str, place: int) -> None:
    changed = getattr(tensor, part).clone()
    changed.view(-1)[place] ^= 1
    assert digest(replace(tensor, **{part: changed})) != KNOWN


@pytest.mark.parametrize("factor", [2.0, 0.5, 1 + 2.0**-23, -1.0])
def test_the_global_scale_counts_to_its_last_bit(tensor: Fp4Tensor, factor: float) -> None:
    assert digest(replace(tensor, global_scale=tensor.global_scale * factor)) != KNOWN


def test_the_order_of_rows_and_of_parts_counts(tensor: Fp4Tensor) -> None:
    assert digest(quantize_weight(WEIGHT.flip(0))) != KNOWN
    packed = pack_nibbles(tensor.codes_u8)
    assert digest_packed(packed, tensor.scales_u8, tensor.global_scale) == KNOWN
    assert digest_packed(tensor.scales_u8, packed, tensor.global_scale) != KNOWN


def test_strides_gradients_and_a_wider_global_scale_do_not_matter(tensor: Fp4Tensor) -> None:
    transposed = tensor.codes_u8.T.contiguous().T
    assert not transposed.is_contiguous()
    scale = tensor.global_scale.to(torch.float64).requires_grad_()
    assert digest(Fp4Tensor(transposed, tensor.scales_u8.T.clone().T, scale, 16)) == KNOWN


def test_one_scale_a_token_counts_whole() -> None:
    packed, scales = torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    expected = hashlib.sha256(bytes(18) + bytes.fromhex("0000803f" + "00000040")).hexdigest()
    assert digest_packed(packed, scales, torch.tensor([[1.0], [2.0]])) == expected
