"""Quantize rows to MXFP4: `bridge.fp4.nvfp4.quantize_mxfp4` in one pass.

Shape legend: R rows, N values of a row, B blocks of 32 a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.nvfp4 import MXFP4_BLOCK
from bridge.fp4.triton_arithmetic import (
    decode_e8m0,
    encode_blocks,
    encode_e8m0,
    float_of,
    magnitude_bits,
    upcast,
)
from sglang_trace.kernels.nvfp4 import check_input


def quantize_mxfp4_packed(x_RN: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed code words uint8 [R, N/2] and E8M0 scales uint8 [R, N/32] of BF16 or FP32 rows.

    Raises:
        ValueError: if N is not a multiple of 32 or the dtype is another.
    """
    rows, width = x_RN.shape
    check_input(x_RN, MXFP4_BLOCK)
    blocks = width // MXFP4_BLOCK
    packed_RN = x_RN.new_empty((rows, width // 2), dtype=torch.uint8)
    scales_RB = x_RN.new_empty((rows, blocks), dtype=torch.uint8)
    if x_RN.numel():
        _quantize_mxfp4[(rows,)](
            x_RN.contiguous(),
            packed_RN,
            scales_RB,
            BLOCKS=blocks,
            PADDED=triton.next_power_of_2(blocks),
        )
    return packed_RN, scales_RB


@triton.jit
def _quantize_mxfp4(x, packed, scales, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block_B = tl.arange(0, PADDED)
    live_B = block_B < BLOCKS
    value_BS = block_B[:, None] * 32 + tl.arange(0, 32)[None, :]
    x_BS = upcast(tl.load(x + row * BLOCKS * 32 + value_BS, mask=live_B[:, None], other=0.0))
    amax_B = float_of(tl.max(magnitude_bits(x_BS), axis=1))
    scales_B = encode_e8m0(tl.div_rn(amax_B, tl.full(amax_B.shape, 6.0, tl.float32)))
    codes_BS = encode_blocks(x_BS, decode_e8m0(scales_B))
    tl.store(scales + row * BLOCKS + block_B, scales_B.to(tl.uint8), mask=live_B)
    pairs = tl.reshape(codes_BS << (4 * (value_BS & 1)), (PADDED, 16, 2))
    byte_B16 = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(
        packed + row * BLOCKS * 16 + byte_B16,
        tl.sum(pairs, axis=2).to(tl.uint8),
        mask=live_B[:, None],
    )
