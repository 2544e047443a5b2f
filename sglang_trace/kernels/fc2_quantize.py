"""fc2: silu(gate) * up, quantize and record, one program per token and expert slot.

Shape legend: T tokens, K expert slots, R = T * K rows (token-major), I expert width, B blocks
(padded), S = 16 values of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.nvfp4 import NVFP4_BLOCK
from bridge.fp4.triton_arithmetic import float_of, quantize_token, round_bf16, upcast
from sglang_trace.kernels.nvfp4 import check_input
from sglang_trace.kernels.record import OPERAND_GROUP, write_operand, write_site
from sglang_trace.kernels.staging_columns import LayerColumns

# log2(e) in two parts: a BF16 number has 8 bits, so its product with the first, of 16, is exact.
_LOG2E_HIGH: tl.constexpr = tl.constexpr(94548.0 * 2.0**-16)
_LOG2E_LOW: tl.constexpr = tl.constexpr(1.4426950408889634 - 94548.0 * 2.0**-16)


def quantize_expert_slots(
    gate_up_R2I: Tensor, slots: int, operand_RI: Tensor, columns: LayerColumns | None
) -> None:
    """Apply the gated SiLU, quantize to NVFP4, store the GEMM's operand and record it.

    `silu(gate)` is rounded to BF16 and so is its product with `up`, as in `experts.gate_up`; the
    rest is as in `token_rows.quantize_tokens`, row R being slot R % K of token R // K.

    Args:
        gate_up_R2I: BF16 [R, 2I], the gate's columns first, contiguous.
        slots: K.
        operand_RI: BF16 [R, I], written.
        columns: where to record, None to record nothing.

    Raises:
        ValueError: if I is not a multiple of 32.
    """
    rows, width = operand_RI.shape
    check_input(operand_RI, OPERAND_GROUP)
    assert gate_up_R2I.shape == (rows, 2 * width)
    assert gate_up_R2I.is_contiguous()
    assert operand_RI.is_contiguous()
    blocks = width // NVFP4_BLOCK
    fc2 = columns.fc2 if columns else None
    rows_MB = columns.rows_MB if columns else operand_RI
    if rows == 0:
        return
    assert columns is None or len(rows_MB) * slots >= rows
    _quantize_slots[(rows,)](
        gate_up_R2I,
        operand_RI,
        rows_MB,
        rows_MB.stride(0),
        fc2 or 0,
        columns.fc2_slot if columns else 0,
        slots,
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        BITS=columns.bits if columns else 1,
        SCALE_BITS=columns.scale_bits if columns else 8,
        FC2=fc2 is not None,
    )


@triton.jit
def silu_bf16(x):
    """Return silu of BF16 numbers (given as float32), rounded to BF16.

    Equal to torch's for every BF16 number: its argument has only 65,536 values, and a test goes
    through them. A hardware exp2 of x * log2(e) would be too coarse for that: the product's
    rounding grows with x.
    """
    # Clipping keeps the integer part within two exponents' reach; exp(-x) is 0 or inf beyond.
    clipped = tl.minimum(tl.maximum(-x, -174.0), 174.0)
    high = clipped * _LOG2E_HIGH
    whole = (high + 12582912.0) - 12582912.0
    power = tl.exp2((high - whole) + clipped * _LOG2E_LOW)
    half = whole.to(tl.int32) >> 1
    rest = whole.to(tl.int32) - half
    e = power * float_of((half + 127) << 23) * float_of((rest + 127) << 23)
    return round_bf16(tl.div_rn(x, 1.0 + e))


@triton.jit
def _quantize_slots(
    gate_up,
    operand,
    rows,
    row_bytes,
    fc2_at,
    slot_bytes,
    slots,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    FC2: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    block_B = tl.arange(0, PADDED)
    live_B = block_B < BLOCKS
    value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
    gate = gate_up + index * (BLOCKS * 32) + value_BS
    gate_BS = upcast(tl.load(gate, mask=live_B[:, None], other=0.0))
    up_BS = upcast(tl.load(gate + BLOCKS * 16, mask=live_B[:, None], other=0.0))
    h_BS = upcast(round_bf16(upcast(silu_bf16(gate_BS)) * up_BS))
    codes_BS, scales_B, effective_B, token_scale = quantize_token(h_BS)
    write_operand(operand + index * BLOCKS * 16, codes_BS, effective_B, PADDED, BLOCKS)
    if FC2:
        cell = rows + (index // slots) * row_bytes + fc2_at + (index % slots) * slot_bytes
        write_site(cell, codes_BS, scales_B, token_scale, live_B, PADDED, BLOCKS, BITS, SCALE_BITS)
