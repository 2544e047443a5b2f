"""Quantize rows to NVFP4: `bridge.fp4.nvfp4.quantize_nvfp4` in one pass.

Shape legend: M matrices, R rows of a matrix, N values of a row, B blocks of 16 per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.nvfp4 import NVFP4_BLOCK, token_scale
from bridge.fp4.triton_arithmetic import quantize_nvfp4_blocks, upcast


def quantize_nvfp4_packed(
    x_MRN: Tensor, global_scale_M: Tensor, packed_MRN: Tensor, scales_MRB: Tensor
) -> None:
    """Quantize BF16 or FP32 matrices into packed code words and E4M3 scales, in place.

    The bits are those of `pack_nibbles(quantize_nvfp4(x, global_scale).codes_u8)`. Any of the
    tensors may be a slice of a larger one, as long as rows are contiguous.

    Args:
        x_MRN: [M, R, N] BF16 or FP32, N a multiple of 16.
        global_scale_M: float32 [M], one a matrix.
        packed_MRN: uint8 [M, R, N/2], written.
        scales_MRB: uint8 [M, R, N/16], written.

    Raises:
        ValueError: if N is not a multiple of 16 or a dtype is another.
    """
    matrices, rows, width = x_MRN.shape
    check_input(x_MRN, NVFP4_BLOCK)
    blocks = width // NVFP4_BLOCK
    assert packed_MRN.shape == (matrices, rows, width // 2)
    assert scales_MRB.shape == (matrices, rows, blocks)
    assert x_MRN.stride(2) == packed_MRN.stride(2) == scales_MRB.stride(2) == 1
    if x_MRN.numel() == 0:
        return
    _quantize_nvfp4[(matrices * rows,)](
        x_MRN,
        global_scale_M.contiguous(),
        packed_MRN,
        scales_MRB,
        rows,
        *x_MRN.stride()[:2],
        *packed_MRN.stride()[:2],
        *scales_MRB.stride()[:2],
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
    )


def quantize_weights(
    w_EOI: Tensor, packed_EOI: Tensor, scales_EOB: Tensor, global_scale_E: Tensor
) -> None:
    """Quantize one weight matrix per expert, as `bridge.fp4.nvfp4.quantize_weight` does, in place.

    What a CUDA graph has recorded about the destinations stays true: no tensor is replaced.

    Args:
        w_EOI: BF16 [E, O, I].
        packed_EOI: uint8 [E, O, I/2], written.
        scales_EOB: uint8 [E, O, I/16], written.
        global_scale_E: float32 [E], written.
    """
    # Two reductions instead of abs(): no copy of the weights, and NaN wins in both.
    amax_E = torch.maximum(w_EOI.amax(dim=(1, 2)), -w_EOI.amin(dim=(1, 2)))
    global_scale_E.copy_(token_scale(amax_E.unsqueeze(1)).squeeze(1))
    quantize_nvfp4_packed(w_EOI, global_scale_E, packed_EOI, scales_EOB)


def check_input(x: Tensor, block: int) -> None:
    """Refuse what the kernels do not compute.

    Raises:
        ValueError: naming it.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"The FP4 kernels take BF16 or FP32, not {x.dtype}: convert first.")
    if x.shape[-1] % block:
        raise ValueError(f"Blocks of {block} do not divide a last dimension of {x.shape[-1]}.")


@triton.jit
def _quantize_nvfp4(
    x,
    global_scale,
    packed,
    scales,
    rows,
    x_matrix,
    x_row,
    packed_matrix,
    packed_row,
    scales_matrix,
    scales_row,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    matrix = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    block_B = tl.arange(0, PADDED)
    live_B = block_B < BLOCKS
    value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
    x_BS = upcast(
        tl.load(x + matrix * x_matrix + row * x_row + value_BS, mask=live_B[:, None], other=0.0)
    )
    codes_BS, scales_B, _ = quantize_nvfp4_blocks(x_BS, tl.load(global_scale + matrix))
    tl.store(
        scales + matrix * scales_matrix + row * scales_row + block_B,
        scales_B.to(tl.uint8),
        mask=live_B,
    )
    pairs = tl.reshape(codes_BS << (4 * (value_BS & 1)), (PADDED, 8, 2))
    byte_B8 = block_B[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(
        packed + matrix * packed_matrix + row * packed_row + byte_B8,
        tl.sum(pairs, axis=2).to(tl.uint8),
        mask=live_B[:, None],
    )
