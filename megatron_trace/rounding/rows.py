"""Rounding one site's rows: guided by the rollout's record, to nearest where there is none.

Shape legend: R rows of a call (tokens, or dispatched token-expert pairs), N values per row (this
rank's part of it), B = N / 16 blocks per row, W bytes of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from bridge.errors import TraceError
from bridge.formats import FULL_SCALE_BITS
from bridge.fp4.guided_rounding import MatchRule, guided_quantize, straight_through
from bridge.fp4.nvfp4 import (
    MAGNITUDE_BITS,
    NVFP4_BLOCK,
    SIGN_BIT,
    Fp4Tensor,
    block_scales,
    quantize_nvfp4,
    token_scale,
)
from bridge.fp4.scale_bits import ReadScales, read_low_scales
from bridge.layout import SiteRecord

if TYPE_CHECKING:
    from megatron_trace.kernels.round_rows import RecordRows

# Rows that are rounded side by side on a GPU add to so many counters.
COUNTER_LANES = 64
KERNEL_DTYPES = (torch.bfloat16, torch.float32)


class RecordsOfOtherRank(TraceError):
    """Records were fetched for the tensor-parallel part of another rank."""


class RowState(IntEnum):
    """Whether a row has a record."""

    PADDING = 0  # not a token, or a sampled token that the rollout never consumed
    MISSING = 1
    RECORDED = 2


class Counter(IntEnum):
    """What is counted at a site, in values (elements) or blocks, so that ranks' counts add up."""

    GUIDED = 0
    MISSING = 1
    COMPARED = 2
    AGREE_USED = 3  # the code word used is the rollout's
    AGREE_NEAREST = 4  # round-to-nearest at the trainer's own scale gives the rollout's
    ADJACENT_NEAREST = 5  # round-to-nearest misses the rollout's code word by one
    # The next five are blocks, not values.
    READ_SCALES = 6  # block scales read from their low bits
    AMBIGUOUS_SCALES = 7  # of those, two codes or more from the trainer's own
    CHECKED_SCALES = 8  # of those read, the record holds the whole scale too
    WRONG_SCALES = 9  # of those checked, read as another code than the rollout's
    SILENT_SCALES = 10  # of those wrong, not ambiguous
    NON_FINITE = 11


@dataclass(frozen=True)
class GuidanceSpec:
    """How closely records are followed.

    bits        low bits of the recorded code words that guide the rounding; 0 rounds to nearest
    scale_bits  bits of the recorded block scales that are followed: 8, or 2 and the own scale
    compare     count agreement with the rollout's full code words (needs 4-bit records)
    """

    bits: int
    scale_bits: int
    reading: MatchRule
    compare: bool


@dataclass(frozen=True)
class SiteRows:
    """The records of one call's rows.

    record        planes, block scales and token scales of the values that were fetched
    global_scale  float32 [R, 1] or [], the rollout's second scale
    state         uint8 [R], `RowState`
    counts        int64 [COUNTER_LANES, len(Counter)], whose sum over lanes counts; or None
    held          which values of the full row width the record has
    """

    record: SiteRecord
    global_scale: Tensor
    state: Tensor
    following: GuidanceSpec
    counts: Tensor | None
    held: range

    def rounded(self, values_RN: Tensor, own: Fp4Tensor, first: int) -> Fp4Tensor:
        """Return the code words the forward uses for values that start at column `first`.

        Raises:
            RecordsOfOtherRank: if the record does not have these columns.
        """
        columns = self._columns(first, first + values_RN.shape[-1])
        codes_u8 = self.record.low_codes()[:, columns]
        used = own
        if self.following.bits:
            scales_u8 = self._scales(values_RN, own, columns)
            recorded = Fp4Tensor(codes_u8, scales_u8, self.global_scale, NVFP4_BLOCK)
            used = self._merge(values_RN, own, recorded)
        if self.counts is not None:
            self._count(self.counts[0], own, used, codes_u8)
        return used

    def for_kernel(self, first: int, last: int) -> RecordRows:
        """Return the rows as `megatron_trace.kernels.round_rows` takes them.

        Raises:
            RecordsOfOtherRank: if the record does not have these columns.
        """
        from megatron_trace.kernels.round_rows import RecordRows

        return RecordRows(
            planes_u8=self.record.planes_u8,
            scales_u8=self.record.scales_u8,
            global_scale=self.global_scale,
            state=self.state,
            first=self._columns(first, last).start,
            record_bits=self.record.bits,
            record_scale_bits=self.record.scale_bits,
            bits=self.following.bits,
            scale_bits=self.following.scale_bits,
            nearest=self.following.reading is MatchRule.NEAREST,
            compare=self.following.compare,
            counts=self.counts,
        )

    def _columns(self, first: int, last: int) -> slice:
        """Return where values [first, last) of the full row lie in the record."""
        if not self.held.start <= first <= last <= self.held.stop:
            raise RecordsOfOtherRank(
                f"This rank computes values {first} to {last} of a row, the records have "
                f"{self.held.start} to {self.held.stop}: fetch them on every rank for its own "
                "part of the model."
            )
        return slice(first - self.held.start, last - self.held.start)

    def _scales(self, values_RN: Tensor, own: Fp4Tensor, columns: slice) -> Tensor:
        """Return the rollout's E4M3 codes of these columns of the record, uint8 [R, B]."""
        blocks = slice(columns.start // NVFP4_BLOCK, columns.stop // NVFP4_BLOCK)
        if self.following.scale_bits == FULL_SCALE_BITS:
            return self.record.scales_u8[:, blocks].contiguous()
        low_u8 = self.record.low_scales()[:, blocks]
        read = read_low_scales(low_u8, block_scales(values_RN, self.global_scale))
        if self.counts is not None:
            self._count_scales(self.counts[0], own, read, blocks)
        return read.codes_u8

    def _merge(self, values_RN: Tensor, own: Fp4Tensor, recorded: Fp4Tensor) -> Fp4Tensor:
        """Guide the recorded rows; keep nearest rounding for the others and for NaN blocks."""
        follow = self.following
        low_u8 = recorded.codes_u8 & ((1 << follow.bits) - 1)
        guided = guided_quantize(
            values_RN, recorded.effective_scale(), low_u8, follow.bits, follow.reading
        )
        row_R1 = (self.state == RowState.RECORDED).unsqueeze(-1)
        block_RB = self._guided_blocks(own)
        return Fp4Tensor(
            torch.where(_per_value(block_RB), guided, own.codes_u8),
            torch.where(block_RB, recorded.scales_u8, own.scales_u8),
            torch.where(row_R1, recorded.global_scale, own.global_scale),
            NVFP4_BLOCK,
        )

    def _count_scales(
        self, counts: Tensor, own: Fp4Tensor, read: ReadScales, blocks: slice
    ) -> None:
        guided_RB = self._guided_blocks(own)
        counts[Counter.READ_SCALES] += guided_RB.sum()
        counts[Counter.AMBIGUOUS_SCALES] += (guided_RB & read.ambiguous).sum()
        if self.record.scale_bits == FULL_SCALE_BITS:
            wrong_RB = guided_RB & (read.codes_u8 != self.record.scales_u8[:, blocks])
            counts[Counter.CHECKED_SCALES] += guided_RB.sum()
            counts[Counter.WRONG_SCALES] += wrong_RB.sum()
            counts[Counter.SILENT_SCALES] += (wrong_RB & ~read.ambiguous).sum()

    def _guided_blocks(self, own: Fp4Tensor) -> Tensor:
        """Say which blocks follow the record: recorded rows, but for blocks of NaN: bool [R, B]."""
        return (self.state == RowState.RECORDED).unsqueeze(-1) & torch.isfinite(
            own.effective_scale()
        )

    def _count(self, counts: Tensor, own: Fp4Tensor, used: Fp4Tensor, codes_u8: Tensor) -> None:
        width = own.codes_u8.shape[-1]
        recorded_R1 = (self.state == RowState.RECORDED).unsqueeze(-1)
        recorded_values = recorded_R1.sum() * width
        if self.following.bits:
            counts[Counter.GUIDED] += recorded_values
            counts[Counter.MISSING] += (self.state == RowState.MISSING).sum() * width
        counts[Counter.NON_FINITE] += (~torch.isfinite(own.effective_scale())).sum() * NVFP4_BLOCK
        if self.following.compare:
            theirs = _code_line(codes_u8)
            miss_own = (_code_line(own.codes_u8) - theirs).abs()
            counts[Counter.COMPARED] += recorded_values
            counts[Counter.AGREE_USED] += (
                recorded_R1 & (_code_line(used.codes_u8) == theirs)
            ).sum()
            counts[Counter.AGREE_NEAREST] += (recorded_R1 & (miss_own == 0)).sum()
            counts[Counter.ADJACENT_NEAREST] += (recorded_R1 & (miss_own == 1)).sum()

    # --- following the rows through the token dispatcher

    def packed(self) -> Tensor:
        """Return records and states as bytes, uint8 [..., W], to travel with the tokens."""
        token_scale_u8 = self.global_scale.contiguous().view(torch.uint8)
        pieces = (self.record.planes_u8, self.record.scales_u8, token_scale_u8)
        return torch.cat((*pieces, self.state.unsqueeze(-1)), dim=-1)

    def unpacked(self, packed_RW: Tensor) -> SiteRows:
        """Return the rows that arrived, in their new order."""
        planes = self.record.planes_u8.shape[-1]
        scales = planes + self.record.scales_u8.shape[-1]
        global_scale = packed_RW[:, scales:-1].contiguous().view(torch.float32)
        record = replace(
            self.record,
            planes_u8=packed_RW[:, :planes],
            scales_u8=packed_RW[:, planes:scales],
            token_scale=global_scale,
        )
        return replace(self, record=record, global_scale=global_scale, state=packed_RW[:, -1])

    def __getitem__(self, rows: slice) -> SiteRows:
        """Return some of the rows."""
        record = replace(
            self.record,
            planes_u8=self.record.planes_u8[rows],
            scales_u8=self.record.scales_u8[rows],
        )
        scale = self.global_scale[rows] if self.global_scale.dim() else self.global_scale
        return replace(self, record=record, global_scale=scale, state=self.state[rows])


@dataclass(frozen=True)
class ExpertRows:
    """The records of the rows that this rank's experts compute, sorted by local expert.

    tokens_per_expert: int64 [local experts], how many rows each of them computes.
    """

    rows: SiteRows
    tokens_per_expert: Tensor

    def of_expert(self, local_expert: int | None) -> SiteRows:
        """Return the rows of one local expert, or those of all."""
        if local_expert is None:
            return self.rows
        first, last = self._bounds[local_expert : local_expert + 2]
        return self.rows[first:last]

    @cached_property
    def _bounds(self) -> list[int]:
        bounds: list[int] = torch.nn.functional.pad(
            self.tokens_per_expert.cumsum(0), (1, 0)
        ).tolist()
        return bounds


def round_rows(
    values_RN: Tensor, own_global_scale: Tensor | None, rows: SiteRows | None, first: int = 0
) -> Tensor:
    """Return the values as FP4 sees them, same dtype, gradient straight through.

    On a GPU one kernel does it; elsewhere torch does, with the same bits.

    Args:
        values_RN: [R, N], N a multiple of 16.
        own_global_scale: float32 [] or [R, 1], used where the rollout recorded nothing; None is
            the token scale of each row.
        rows: the rollout's records; None rounds everything to nearest.
        first: the column of the full row that `values_RN` begins with (tensor parallelism).
    """
    with torch.no_grad():
        values = values_RN.detach()
        if values.is_cuda and values.dtype in KERNEL_DTYPES:
            rounded = _rounded_by_kernel(values, own_global_scale, rows, first)
        else:
            rounded = _rounded_by_torch(values, own_global_scale, rows, first)
    return straight_through(values_RN, rounded)


def _rounded_by_torch(
    values_RN: Tensor, own_scale: Tensor | None, rows: SiteRows | None, first: int
) -> Tensor:
    fp4 = quantize_nvfp4(values_RN, token_scale(values_RN) if own_scale is None else own_scale)
    if rows is not None:
        fp4 = rows.rounded(values_RN, fp4, first)
    return fp4.dequantize(values_RN.dtype)


def _rounded_by_kernel(
    values_RN: Tensor, own_scale: Tensor | None, rows: SiteRows | None, first: int
) -> Tensor:
    from megatron_trace.kernels.round_rows import round_rows as kernel

    followed = None if rows is None else rows.for_kernel(first, first + values_RN.shape[-1])
    return kernel(values_RN, own_scale, followed)


def own_token_scale(values_RN: Tensor, group: ProcessGroup) -> Tensor:
    """Return the trainer's token scales [R, 1]; the ranks of `group` share the rows."""
    with torch.no_grad():
        amax_R1 = values_RN.detach().abs().amax(dim=-1, keepdim=True).to(torch.float32)
        all_reduce(amax_R1, ReduceOp.MAX, group)
        return token_scale(amax_R1)


def _code_line(codes_u8: Tensor) -> Tensor:
    """Return the place of code words on the number line, int8 -7 to 7; both zeros are 0."""
    index = (codes_u8 & MAGNITUDE_BITS).to(torch.int8)
    return torch.where((codes_u8 & SIGN_BIT) > 0, -index, index)


def _per_value(per_block_RB: Tensor) -> Tensor:
    return per_block_RB.repeat_interleave(NVFP4_BLOCK, dim=-1)
