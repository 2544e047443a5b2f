"""Weigh rows with the router's probabilities, and the probabilities' gradient, in one pass each.

`megatron_trace.layers.weighing` says why the gradient is taken from the input of fc2.

Shape legend: P rows dispatched to this rank, N values of a row (hidden size, or this rank's part of
the intermediate size).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.triton_arithmetic import round_bf16, upcast


def scale_rows(x_PN: Tensor, factor_P: Tensor) -> Tensor:
    """Return every row times its factor, multiplied in FP32 and rounded once: as `x_PN`.

    Args:
        x_PN: BF16 or FP32, contiguous.
        factor_P: FP32 or BF16.
    """
    rows, width = x_PN.shape
    y_PN = torch.empty_like(x_PN)
    if rows:
        padded = triton.next_power_of_2(width)
        _scale_rows[(rows,)](x_PN, factor_P, y_PN, width, PADDED=padded, num_warps=_warps(padded))
    return y_PN


def dot_rows(x_PN: Tensor, y_PN: Tensor, divisor_P: Tensor) -> Tensor:
    """Return the scalar product of two rows over their divisor, 0 where that is 0: FP32 [P].

    Args:
        x_PN, y_PN: BF16 or FP32, contiguous.
        divisor_P: FP32 or BF16.
    """
    rows, width = x_PN.shape
    dot_P = torch.empty(rows, dtype=torch.float32, device=x_PN.device)
    if rows:
        padded = triton.next_power_of_2(width)
        _dot_rows[(rows,)](
            x_PN, y_PN, divisor_P, dot_P, width, PADDED=padded, num_warps=_warps(padded)
        )
    return dot_P


def _warps(padded: int) -> int:
    return min(max(padded // 512, 1), 8)


@triton.jit
def _scale_rows(x, factor, y, width, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column_N = tl.arange(0, PADDED)
    live_N = column_N < width
    value_N = row * width + column_N
    scaled_N = upcast(tl.load(x + value_N, mask=live_N, other=0.0)) * upcast(tl.load(factor + row))
    if y.dtype.element_ty == tl.bfloat16:
        tl.store(y + value_N, round_bf16(scaled_N), mask=live_N)
    else:
        tl.store(y + value_N, scaled_N, mask=live_N)


@triton.jit
def _dot_rows(x, y, divisor, dot, width, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column_N = tl.arange(0, PADDED)
    live_N = column_N < width
    value_N = row * width + column_N
    x_N = upcast(tl.load(x + value_N, mask=live_N, other=0.0))
    y_N = upcast(tl.load(y + value_N, mask=live_N, other=0.0))
    by = upcast(tl.load(divisor + row))
    product = tl.sum(x_N * y_N, axis=0)
    tl.store(dot + row, tl.where(by == 0.0, 0.0, product / by))
