"""Round rows to NVFP4, guided by records or to nearest, in one pass.

One program reads a row, quantizes it at the trainer's own scales, follows the row's record where
there is one, and writes the values that the GEMM or attention sees. `megatron_trace.rounding.rows`
is the reference.

Shape legend: R rows, N values per row, B = N / 16 blocks per row, S = 16 values of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.fp4.triton_arithmetic import (
    decode_e2m1,
    decode_e4m3,
    encode_e4m3,
    float_of,
    magnitude_bits,
    power_scale,
    quantize_nvfp4_blocks,
    round_bf16,
    upcast,
)

_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)
_RECORDED: tl.constexpr = tl.constexpr(2)
_MISSING: tl.constexpr = tl.constexpr(1)
_GUIDED_COUNT: tl.constexpr = tl.constexpr(0)
_MISSING_COUNT: tl.constexpr = tl.constexpr(1)
_COMPARED: tl.constexpr = tl.constexpr(2)
_AGREE_USED: tl.constexpr = tl.constexpr(3)
_AGREE_NEAREST: tl.constexpr = tl.constexpr(4)
_ADJACENT_NEAREST: tl.constexpr = tl.constexpr(5)
_READ_SCALES: tl.constexpr = tl.constexpr(6)
_AMBIGUOUS_SCALES: tl.constexpr = tl.constexpr(7)
_CHECKED_SCALES: tl.constexpr = tl.constexpr(8)
_WRONG_SCALES: tl.constexpr = tl.constexpr(9)
_SILENT_SCALES: tl.constexpr = tl.constexpr(10)
_NON_FINITE: tl.constexpr = tl.constexpr(11)
_COUNTERS: tl.constexpr = tl.constexpr(12)


class OwnScale(IntEnum):
    """Where the trainer's own second scale comes from."""

    OF_ROW = 0  # computed from the row, as `bridge.fp4.nvfp4.token_scale` does
    PER_ROW = 1  # given for every row
    ONE = 2  # given once


@dataclass(frozen=True)
class RecordRows:
    """The records of the rows, and how they are followed; strides are those of the tensors.

    planes_u8     uint8 [R, record_bits * record width / 8]
    scales_u8     uint8 [R, record width / 16], of 2 bits four to a byte
    global_scale  float32 [R, 1] or []
    state         uint8 [R], `megatron_trace.rounding.rows.RowState`
    first         the record's column of the rows' first value, a multiple of 16
    record_bits, record_scale_bits  what the record holds
    bits, scale_bits                what is followed; bits 0 rounds to nearest
    nearest       read a record of 1 or 2 bits as the nearest value, not by parity
    compare       count agreement with whole code words
    counts        int64 [COUNTER_LANES, 12], or None; a row adds to one lane, so few rows wait
    """

    planes_u8: Tensor
    scales_u8: Tensor
    global_scale: Tensor
    state: Tensor
    first: int
    record_bits: int
    record_scale_bits: int
    bits: int
    scale_bits: int
    nearest: bool
    compare: bool
    counts: Tensor | None


def round_rows(x_RN: Tensor, own_scale: Tensor | None, record: RecordRows | None) -> Tensor:
    """Return the rows as FP4 sees them, in new memory, same dtype.

    Args:
        x_RN: BF16 or FP32 [R, N], N a multiple of 16, values of a row next to each other.
        own_scale: float32 [R, 1] or [], the trainer's second scale; None computes one per row.
        record: the rollout's records of the rows; None rounds everything to nearest.

    Raises:
        ValueError: if the kernel does not compute this dtype or width.
    """
    rows, width = x_RN.shape
    if x_RN.dtype not in (torch.bfloat16, torch.float32) or width % 16:
        raise ValueError(
            f"the rounding kernel takes BF16 or FP32 rows of whole blocks of 16, not {x_RN.dtype} "
            f"[{rows}, {width}]; round on the CPU, or convert first"
        )
    x_RN = x_RN if x_RN.stride(1) == 1 else x_RN.contiguous()
    y_RN = torch.empty((rows, width), dtype=x_RN.dtype, device=x_RN.device)
    if not y_RN.numel():
        return y_RN
    own, given = _own(own_scale, x_RN)
    arguments = _nothing(x_RN) if record is None else _followed(record)
    blocks = width // 16
    padded = triton.next_power_of_2(blocks)
    _round_rows[(rows,)](
        x_RN,
        y_RN,
        given,
        *arguments,
        x_RN.stride(0),
        OWN=int(own),
        LANES=1 if record is None or record.counts is None else len(record.counts),
        BLOCKS=blocks,
        PADDED=padded,
        num_warps=min(max(padded // 16, 1), 8),
    )
    return y_RN


def _own(own_scale: Tensor | None, x_RN: Tensor) -> tuple[OwnScale, Tensor]:
    if own_scale is None:
        return OwnScale.OF_ROW, x_RN
    kind = OwnScale.PER_ROW if own_scale.dim() else OwnScale.ONE
    return kind, own_scale.contiguous()


def _nothing(x_RN: Tensor) -> tuple[object, ...]:
    """Return the kernel's arguments where nothing is followed or counted."""
    return (x_RN, x_RN, x_RN, x_RN, x_RN, 0, 0, 0, 0, 0, False, False, 1, 8, 0, 8, False, False)


def _followed(record: RecordRows) -> tuple[object, ...]:
    planes = record.planes_u8 if record.planes_u8.stride(1) == 1 else record.planes_u8.contiguous()
    scales = record.scales_u8 if record.scales_u8.stride(1) == 1 else record.scales_u8.contiguous()
    return (
        planes,
        scales,
        record.global_scale.contiguous(),
        record.state.contiguous(),
        planes if record.counts is None else record.counts,
        planes.stride(0),
        planes.shape[1] // record.record_bits,
        scales.stride(0),
        record.first,
        record.global_scale.dim(),
        True,
        record.counts is not None,
        record.record_bits,
        record.record_scale_bits,
        record.bits,
        record.scale_bits,
        record.nearest,
        record.compare,
    )


@triton.jit
def _round_rows(
    x,
    y,
    own_scale,
    planes,
    scales,
    global_scale,
    state,
    counts,
    planes_row,
    plane_bytes,
    scales_row,
    first,
    GLOBAL_DIM: tl.constexpr,
    RECORD: tl.constexpr,
    COUNT: tl.constexpr,
    RECORD_BITS: tl.constexpr,
    RECORD_SCALE_BITS: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    NEAREST: tl.constexpr,
    COMPARE: tl.constexpr,
    x_row,
    OWN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block_B = tl.arange(0, PADDED)
    live_B = block_B < BLOCKS
    value_BS = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
    x_BS = upcast(tl.load(x + row * x_row + value_BS, mask=live_B[:, None], other=0.0))
    if OWN == 0:
        own = power_scale(tl.max(tl.max(magnitude_bits(x_BS), axis=1), axis=0))
    elif OWN == 1:
        own = tl.load(own_scale + row)
    else:
        own = tl.load(own_scale)
    codes_BS, own_scales_B, effective_B = quantize_nvfp4_blocks(x_BS, own)
    if RECORD:
        counter = counts + (row % LANES) * _COUNTERS
        finite_B = live_B & ((_bits(effective_B) & 0x7FFFFFFF) < _INF_BITS)
        row_state = tl.load(state + row).to(tl.int32)
        recorded = row_state == _RECORDED
        rollout_scale = tl.load(global_scale + row) if GLOBAL_DIM else tl.load(global_scale)
        low_BS = _low_codes(
            planes + row * planes_row, plane_bytes, first + value_BS, live_B, RECORD_BITS
        )
        own_codes_BS = codes_BS
        if BITS > 0:
            guided_B = finite_B & recorded
            recorded_B = _scale_codes(
                scales + row * scales_row, first // 16 + block_B, live_B, RECORD_SCALE_BITS
            )
            if SCALE_BITS == 2:
                read_B, ambiguous_B = _read_low_scales(recorded_B & 3, x_BS, rollout_scale)
                if COUNT:
                    _add(counter, _READ_SCALES, guided_B)
                    _add(counter, _AMBIGUOUS_SCALES, guided_B & ambiguous_B)
                    if RECORD_SCALE_BITS == 8:
                        wrong_B = guided_B & (read_B != recorded_B)
                        _add(counter, _CHECKED_SCALES, guided_B)
                        _add(counter, _WRONG_SCALES, wrong_B)
                        _add(counter, _SILENT_SCALES, wrong_B & (ambiguous_B == 0))
                recorded_B = read_B
            rollout_B = _signed_e4m3(recorded_B) * rollout_scale
            guided_BS = _guided_codes(x_BS, rollout_B, low_BS & ((1 << BITS) - 1), BITS, NEAREST)
            codes_BS = tl.where(guided_B[:, None], guided_BS, codes_BS)
            # A block of NaN in a recorded row keeps its own scale code beside the row's scale.
            kept_scale = tl.where(recorded, rollout_scale, own)
            effective_B = tl.where(guided_B, rollout_B, decode_e4m3(own_scales_B) * kept_scale)
        if COUNT:
            if BITS > 0:
                _add_values(counter, _GUIDED_COUNT, recorded, BLOCKS)
                _add_values(counter, _MISSING_COUNT, row_state == _MISSING, BLOCKS)
            blocks = tl.sum((live_B & (finite_B == 0)).to(tl.int32), axis=0) * 16
            tl.atomic_add(counter + _NON_FINITE, blocks.to(tl.int64), mask=blocks > 0)
            if COMPARE:
                counted_BS = live_B[:, None] & (value_BS >= 0) & recorded
                theirs_BS = _code_line(low_BS)
                missed_BS = tl.abs(_code_line(own_codes_BS) - theirs_BS)
                _add_values(counter, _COMPARED, recorded, BLOCKS)
                _add(counter, _AGREE_USED, counted_BS & (_code_line(codes_BS) == theirs_BS))
                _add(counter, _AGREE_NEAREST, counted_BS & (missed_BS == 0))
                _add(counter, _ADJACENT_NEAREST, counted_BS & (missed_BS == 1))
    rounded_BS = decode_e2m1(codes_BS) * tl.expand_dims(effective_B, 1)
    target = y + row * BLOCKS * 16 + value_BS
    if y.dtype.element_ty == tl.bfloat16:
        tl.store(target, round_bf16(rounded_BS), mask=live_B[:, None])
    else:
        tl.store(target, rounded_BS, mask=live_B[:, None])


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _add(counter, number, where):
    """Add how many are true to a counter; most rows have nothing to add."""
    flat = tl.reshape(where.to(tl.int32), (where.numel,))
    count = tl.sum(flat, axis=0)
    tl.atomic_add(counter + number, count.to(tl.int64), mask=count > 0)


@triton.jit
def _add_values(counter, number, condition, BLOCKS: tl.constexpr):
    """Add the values of a row to a counter if a condition on the row holds."""
    count = condition.to(tl.int64) * (BLOCKS * 16)
    tl.atomic_add(counter + number, count, mask=condition)


@triton.jit
def _low_codes(planes, plane_bytes, column_BS, live_B, BITS: tl.constexpr):
    """Return the recorded bits of code words (`bridge.fp4.bit_planes`) as int32 [B, S]."""
    code_BS = tl.zeros(column_BS.shape, tl.int32)
    for bit in tl.static_range(BITS):
        byte_BS = tl.load(
            planes + bit * plane_bytes + column_BS // 8, mask=live_B[:, None], other=0
        ).to(tl.int32)
        code_BS = code_BS | (((byte_BS >> (column_BS % 8)) & 1) << bit)
    return code_BS


@triton.jit
def _scale_codes(scales, block_B, live_B, BITS: tl.constexpr):
    """Return recorded E4M3 codes, or their low 2 bits (`bridge.fp4.scale_bits`), as int32 [B]."""
    if BITS == 8:
        return tl.load(scales + block_B, mask=live_B, other=0).to(tl.int32)
    else:
        byte_B = tl.load(scales + block_B // 4, mask=live_B, other=0).to(tl.int32)
        return (byte_B >> (2 * (block_B % 4))) & 3


@triton.jit
def _signed_e4m3(code):
    """Decode E4M3 codes of either sign."""
    value = decode_e4m3(code & 0x7F)
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def _read_low_scales(low_B, x_BS, rollout_scale):
    """`bridge.fp4.scale_bits.read_low_scales`: codes int32 [B] and whether they are ambiguous."""
    amax_B = float_of(tl.max(magnitude_bits(x_BS), axis=1))
    global_B = tl.broadcast_to(rollout_scale, amax_B.shape)
    six_B = tl.full(amax_B.shape, 6.0, tl.float32)
    unrounded_B = tl.div_rn(tl.div_rn(amax_B, six_B), global_B)
    own_B = tl.minimum(encode_e4m3(unrounded_B), 0x7E)
    steps_up_B = (low_B - own_B) & 3
    lies_up_B = unrounded_B >= decode_e4m3(own_B)
    up_B = (steps_up_B < 2) | ((steps_up_B == 2) & lies_up_B)
    code_B = own_B + steps_up_B - tl.where(up_B, 0, 4)
    code_B += tl.where(code_B < 0, 4, 0) - tl.where(code_B > 0x7E, 4, 0)
    return code_B, tl.abs(code_B - own_B) >= 2


@triton.jit
def _guided_codes(x_BS, scale_B, low_BS, BITS: tl.constexpr, NEAREST: tl.constexpr):
    """`bridge.fp4.guided_rounding.guided_quantize`: code words int32 [B, S]."""
    scale_BS = tl.broadcast_to(tl.expand_dims(scale_B, 1), x_BS.shape)
    z_BS = tl.where(scale_BS > 0, tl.div_rn(x_BS, scale_BS), 0.0)
    a_BS = tl.minimum(float_of(magnitude_bits(z_BS)), 6.0)
    lower_BS = _index(tl.floor(a_BS * 2), tl.floor(a_BS), tl.floor(a_BS * 0.5))
    upper_BS = _index(tl.ceil(a_BS * 2), tl.ceil(a_BS), tl.ceil(a_BS * 0.5))
    sign_BS = (_bits(z_BS) >> 28) & 8
    if BITS >= 3:
        index_BS = low_BS & 7
        if BITS == 4:
            index_BS = tl.where((low_BS & 8) == sign_BS, index_BS, 0)
    else:
        PERIOD: tl.constexpr = 1 << BITS
        steps_down_BS = (lower_BS - low_BS) & (PERIOD - 1)
        below_BS = lower_BS - steps_down_BS
        above_BS = below_BS + PERIOD
        if NEAREST:
            both_BS = decode_e2m1(below_BS & 7) + decode_e2m1(above_BS & 7)
            goes_up_BS = both_BS <= 2 * a_BS
        else:
            goes_up_BS = steps_down_BS >= PERIOD // 2
        goes_up_BS = ((below_BS < 0) | goes_up_BS) & (above_BS <= 7)
        index_BS = tl.where(goes_up_BS, above_BS, below_BS)
    index_BS = tl.minimum(tl.maximum(index_BS, lower_BS), upper_BS)
    return index_BS | sign_BS


@triton.jit
def _index(twice, once, half):
    """The place on the E2M1 code line, see `bridge.fp4.nvfp4.magnitude_index`."""
    return tl.minimum(twice, tl.minimum(once + 2, half + 4)).to(tl.int32)


@triton.jit
def _code_line(codes_BS):
    """Return code words as -7 to 7; both zeros are 0."""
    index_BS = codes_BS & 7
    return tl.where((codes_BS & 8) != 0, -index_BS, index_BS)
