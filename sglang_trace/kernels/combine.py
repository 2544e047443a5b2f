"""Weigh the slots' outputs and add them up: `experts.combine`.

Shape legend: T tokens, K expert slots, H hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.triton_arithmetic import round_bf16, upcast

_COLUMNS = 1024


def combine(
    y_RH: Tensor, router_weights_TK: Tensor, expert_ids_TK: Tensor, num_experts: int, out_TH: Tensor
) -> None:
    """Add up weight * output over the slots in FP32, slot by slot; round to BF16 once.

    Slots whose expert id is not 0 <= id < `num_experts` count nothing, whatever their row of
    `y_RH` holds.

    Args:
        y_RH: BF16 [T * K, H].
        router_weights_TK: FP32 or BF16 [T, K].
        expert_ids_TK: int32 or int64 [T, K].
        num_experts: E.
        out_TH: BF16 [T, H], written.
    """
    tokens, width = out_TH.shape
    assert y_RH.is_contiguous()
    assert router_weights_TK.stride(1) == expert_ids_TK.stride(1) == out_TH.stride(1) == 1
    if tokens == 0:
        return
    _combine[(tokens, triton.cdiv(width, _COLUMNS))](
        y_RH,
        router_weights_TK,
        expert_ids_TK,
        out_TH,
        router_weights_TK.stride(0),
        expert_ids_TK.stride(0),
        out_TH.stride(0),
        num_experts,
        WIDTH=width,
        SLOTS=router_weights_TK.shape[1],
        COLUMNS=_COLUMNS,
    )


@triton.jit
def _combine(
    y,
    weights,
    expert_ids,
    out,
    weights_row,
    ids_row,
    out_row,
    num_experts,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(SLOTS):
        expert = tl.load(expert_ids + token * ids_row + slot)
        live = (expert >= 0) & (expert < num_experts)
        row = y + (token * SLOTS + slot) * WIDTH
        value = upcast(tl.load(row + column, mask=live & (column < WIDTH), other=0.0))
        weight = upcast(tl.load(weights + token * weights_row + slot))
        total += tl.where(live, value * weight, 0.0)
    tl.store(out + token * out_row + column, round_bf16(total), mask=column < WIDTH)
