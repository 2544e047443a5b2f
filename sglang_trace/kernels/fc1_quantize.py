"""fc1 and routes: quantize the MoE layer's input and record it, one program per token.

Shape legend: T tokens, H hidden size, K expert slots, B blocks (padded), S = 16 values of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.nvfp4 import NVFP4_BLOCK
from bridge.fp4.triton_arithmetic import quantize_token, upcast
from sglang_trace.kernels.nvfp4 import check_input
from sglang_trace.kernels.record import OPERAND_GROUP, write_operand, write_site
from sglang_trace.kernels.staging_columns import LayerColumns


def quantize_tokens(
    x_TH: Tensor, expert_ids_TK: Tensor, operand_TH: Tensor, columns: LayerColumns | None
) -> None:
    """Quantize tokens to NVFP4, store them as the GEMM's operand and record them.

    Code words and scales are those of `quantize_nvfp4(x, token_scale(x))`, the operand is their
    dequantized value in BF16 (exact), in the order of `write_operand`, and the first T
    staging rows get the bytes of `RecordLayout.write_site` and `write_routes`.

    Args:
        x_TH: BF16 or FP32 [T, H], contiguous along H.
        expert_ids_TK: int32 or int64 [T, K] in the router's order.
        operand_TH: BF16 [T, H], written.
        columns: where to record, None to record nothing.

    Raises:
        ValueError: if H is not a multiple of 32 or the dtype is another.
    """
    tokens, width = x_TH.shape
    check_input(x_TH, OPERAND_GROUP)
    assert x_TH.stride(1) == expert_ids_TK.stride(1) == 1
    assert operand_TH.shape == x_TH.shape
    assert operand_TH.is_contiguous()
    slots = expert_ids_TK.shape[1]
    blocks = width // NVFP4_BLOCK
    fc1, routes = (columns.fc1, columns.routes) if columns else (None, None)
    rows_MB = columns.rows_MB if columns else operand_TH
    if tokens == 0:
        return
    assert columns is None or len(rows_MB) >= tokens
    _quantize_tokens[(tokens,)](
        x_TH,
        expert_ids_TK,
        operand_TH,
        rows_MB,
        x_TH.stride(0),
        expert_ids_TK.stride(0),
        rows_MB.stride(0),
        fc1 or 0,
        routes or 0,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        SLOTS=slots,
        PADDED_SLOTS=triton.next_power_of_2(slots),
        BITS=columns.bits if columns else 1,
        SCALE_BITS=columns.scale_bits if columns else 8,
        ID_BYTES=columns.id_bytes if columns else 1,
        FC1=fc1 is not None,
        ROUTES=routes is not None,
    )


@triton.jit
def _quantize_tokens(
    x,
    expert_ids,
    operand,
    rows,
    x_row,
    ids_row,
    row_bytes,
    fc1_at,
    routes_at,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    ID_BYTES: tl.constexpr,
    FC1: tl.constexpr,
    ROUTES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block_B = tl.arange(0, PADDED)
    live_B = block_B < BLOCKS
    value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
    x_BS = upcast(tl.load(x + token * x_row + value_BS, mask=live_B[:, None], other=0.0))
    codes_BS, scales_B, effective_B, token_scale = quantize_token(x_BS)
    write_operand(operand + token * BLOCKS * 16, codes_BS, effective_B, PADDED, BLOCKS)
    row = rows + token * row_bytes
    if FC1:
        cell = row + fc1_at
        write_site(cell, codes_BS, scales_B, token_scale, live_B, PADDED, BLOCKS, BITS, SCALE_BITS)
    if ROUTES:
        slot = tl.arange(0, PADDED_SLOTS)
        ids = tl.load(expert_ids + token * ids_row + slot, mask=slot < SLOTS, other=0).to(tl.int32)
        for byte in tl.static_range(ID_BYTES):
            at = row + routes_at + slot * ID_BYTES + byte
            tl.store(at, (ids >> (8 * byte)).to(tl.uint8), mask=slot < SLOTS)
