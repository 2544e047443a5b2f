"""Inputs that reach every corner of the FP4 formats, and what the tests compare."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def any_bf16(rows: int, width: int, seed: int) -> Tensor:
    """Rows of random BF16 bit patterns, the first half finite: subnormals, -0.0, every exponent."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 1 << 16, (rows, width), generator=generator, dtype=torch.int32)
    x = bits.to(torch.int16).view(torch.bfloat16)
    finite = x[: rows // 2]
    finite[~finite.isfinite()] = -0.0
    return x


def usual_bf16(rows: int, width: int, seed: int) -> Tensor:
    """Normal values of another magnitude in every row, with a row of zeros and one of -0.0."""
    generator = torch.Generator().manual_seed(seed)
    spread = 2.0 ** torch.randint(-40, 40, (rows, 1), generator=generator)
    x = (torch.randn(rows, width, generator=generator) * spread).bfloat16()
    x[rows // 3] = 0.0
    x[rows // 2] = -0.0
    return x


def with_corners(x: Tensor, seed: int) -> Tensor:
    """Ties between code words, zero blocks, amax edges and non-finite values, placed at random."""
    generator = torch.Generator().manual_seed(seed)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = x.clone()
    rows, width = x.shape
    picks = torch.randint(0, len(ties), (width,), generator=generator)
    x[0] = ties[picks].to(x.dtype)
    x[0, ::16] = 6.0
    x[1 % rows, :16] = 0.0
    x[2 % rows, width // 2] = torch.nan
    x[3 % rows, width - 1] = -torch.inf
    return x


def blocks_of(block: int) -> st.SearchStrategy[Tensor]:
    """Two rows of two blocks of any float32 numbers, as BF16 or FP32."""
    number = st.floats(width=32, allow_nan=True, allow_infinity=True)
    near = st.floats(-8, 8, width=32)
    values = st.lists(st.one_of(near, number), min_size=4 * block, max_size=4 * block)
    dtype = st.sampled_from((torch.bfloat16, torch.float32))
    return st.builds(
        lambda v, d: torch.from_numpy(np.array(v, np.float32)).view(2, 2 * block).to(d),
        values,
        dtype,
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether floating-point tensors are equal, -0.0 told from 0.0 and all NaNs alike."""
    a, b = a.cpu(), b.cpu()
    nan = a.isnan()
    word = {2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = (a.view(word) == b.view(word)) | nan
    return bool(torch.equal(nan, b.isnan()) and equal.all())


def operand_order(x: Tensor) -> Tensor:
    """Rows [..., N] as the GEMM's operand has them: in groups of 32, by place modulo 4."""
    return x.unflatten(-1, (-1, 8, 4)).transpose(-1, -2).flatten(-3)


def natural_order(x: Tensor) -> Tensor:
    """The inverse of `operand_order`."""
    return x.unflatten(-1, (-1, 4, 8)).transpose(-1, -2).flatten(-3)
