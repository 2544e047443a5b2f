"""A fingerprint changes with every change of a weight, and with nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_trace.rounding.fingerprint import fingerprint

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, COLUMNS = 6, 32


def matrix(dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)


places = st.tuples(st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1))


@given(st.sampled_from(DTYPES), places, st.data())
def test_every_flipped_bit_changes_it(
    dtype: torch.dtype, place: tuple[int, int], data: st.DataObject
) -> None:
    weight = matrix(dtype)
    before = int(fingerprint(weight))
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    word = weight.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
    word[place] ^= torch.tensor(1 << bit).to(word.dtype)
    assert int(fingerprint(weight)) != before


@given(st.sampled_from(DTYPES), places, places)
def test_exchanging_two_values_changes_it(
    dtype: torch.dtype, one: tuple[int, int], other: tuple[int, int]
) -> None:
    weight = matrix(dtype)
    exchanged = weight.clone()
    exchanged[one], exchanged[other] = weight[other], weight[one]
    same = torch.equal(exchanged, weight)
    assert (int(fingerprint(exchanged)) == int(fingerprint(weight))) is same


@pytest.mark.parametrize("dim", [0, 1])
def test_the_order_of_rows_and_columns_is_part_of_it(dim: int) -> None:
    weight = matrix(torch.bfloat16)
    assert int(fingerprint(weight.flip(dim))) != int(fingerprint(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_changes_do_not_cancel_out(dtype: torch.dtype) -> None:
    weight = matrix(dtype)
    seen = {int(fingerprint(weight * (1 + 2.0**-6 * i))) for i in range(300)}
    assert len(seen) >= 200 if dtype is torch.bfloat16 else len(seen) == 300


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_it_does_not_depend_on_where_the_weight_lies(offset: int) -> None:
    """Parameters are views of one flat buffer, at any offset."""
    weight = matrix(torch.bfloat16)
    flat = torch.zeros(offset + weight.numel(), dtype=torch.bfloat16)
    view = flat[offset:].view_as(weight).copy_(weight)
    transposed = weight.T.contiguous().T
    assert int(fingerprint(view)) == int(fingerprint(transposed)) == int(fingerprint(weight))
