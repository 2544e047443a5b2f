"""Quantize keys and values and store them in their slots of the FP4 pool, in one launch.

Shape legend: T tokens, P slots of the pool, H KV heads, D head size, d = D / 2, b = D / 16; in a
program B blocks of one token's heads (padded), S = 16 values of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.nvfp4 import NVFP4_BLOCK
from bridge.fp4.triton_arithmetic import quantize_nvfp4_blocks, upcast
from sglang_trace.kernels.nvfp4 import check_input


def store_kv(
    k_THD: Tensor,
    v_THD: Tensor,
    slots_T: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k_codes_PHd: Tensor,
    k_scales_PHb: Tensor,
    v_codes_PHd: Tensor,
    v_scales_PHb: Tensor,
) -> None:
    """Store `pack_nibbles(quantize_nvfp4(x, scale).codes_u8)` and its scales at `slots_T`.

    Slots other than these stay as they are. A slot that occurs twice (that of padding does) gets
    bytes of either token.

    Args:
        k_THD, v_THD: BF16 or FP32 [T, H, D], heads and D contiguous, D a multiple of 16.
        slots_T: int32 or int64 [T].
        k_scale, v_scale: float32 of one element, on the device.
        k_codes_PHd, v_codes_PHd: uint8 [P, H, D/2], written.
        k_scales_PHb, v_scales_PHb: uint8 [P, H, D/16], written.

    Raises:
        ValueError: if D is not a multiple of 16 or a dtype is another.
    """
    tokens, heads, size = k_THD.shape
    for x_THD, codes_PHd, scales_PHb in (
        (k_THD, k_codes_PHd, k_scales_PHb),
        (v_THD, v_codes_PHd, v_scales_PHb),
    ):
        check_input(x_THD, NVFP4_BLOCK)
        assert x_THD.shape == (tokens, heads, size)
        assert x_THD.stride()[1:] == (size, 1)
        assert codes_PHd.shape[1:] == (heads, size // 2)
        assert scales_PHb.shape[1:] == (heads, size // NVFP4_BLOCK)
        assert codes_PHd.is_contiguous()
        assert scales_PHb.is_contiguous()
    assert slots_T.shape == (tokens,)
    assert k_scale.numel() == v_scale.numel() == 1
    if tokens == 0:
        return
    blocks = heads * size // NVFP4_BLOCK
    _store_kv[(tokens, 2)](
        k_THD,
        v_THD,
        slots_T,
        k_scale,
        v_scale,
        k_codes_PHd,
        k_scales_PHb,
        v_codes_PHd,
        v_scales_PHb,
        k_THD.stride(0),
        v_THD.stride(0),
        slots_T.stride(0),
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
    )


@triton.jit
def _store_kv(
    k,
    v,
    slots,
    k_scale,
    v_scale,
    k_codes,
    k_scales,
    v_codes,
    v_scales,
    k_token,
    v_token,
    slot_step,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_step).to(tl.int64)
    if tl.program_id(1) == 0:
        _store(k + token * k_token, slot, k_scale, k_codes, k_scales, BLOCKS, PADDED)
    else:
        _store(v + token * v_token, slot, v_scale, v_codes, v_scales, BLOCKS, PADDED)


@triton.jit
def _store(x, slot, scale, codes, scales, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    block_B = tl.arange(0, PADDED)
    live_B = block_B < BLOCKS
    value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
    x_BS = upcast(tl.load(x + value_BS, mask=live_B[:, None], other=0.0))
    codes_BS, scales_B, _ = quantize_nvfp4_blocks(x_BS, tl.load(scale))
    tl.store(scales + slot * BLOCKS + block_B, scales_B.to(tl.uint8), mask=live_B)
    pairs = tl.reshape(codes_BS << (4 * (value_BS & 1)), (PADDED, 8, 2))
    byte_B8 = block_B[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(
        codes + slot * (BLOCKS * 8) + byte_B8,
        tl.sum(pairs, axis=2).to(tl.uint8),
        mask=live_B[:, None],
    )
