"""Gather K and V records out of the FP4 KV pool: all layers and sites in one launch.

Shape legend: n slots asked for, P slots of the pool, H KV heads, D head size, C = H * D / 8 groups
of eight code words and S = C / 2 scales a row (padded), B bytes of a KV row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bridge.layout import Part, RecordLayout, Site
from sglang_trace.kernels.record import write_scales


@dataclass(frozen=True)
class PoolSite:
    """Keys or values of one layer in the pool: codes [P, H, D/2], E4M3 scales [P, H, D/16]."""

    site: Site
    layer: int
    codes_PHd: Tensor
    scales_PHb: Tensor


@dataclass(frozen=True)
class DueRows:
    """Records of the slots that were due, in their order, on the device.

    count_1   int64 [1], how many there are
    rows_n    int64 [n], their row numbers; only the first `count_1` are written
    rows_nB   uint8 [n, B], rows of the KV part; only the first `count_1` are written
    nan_1     int32 [1], 0 or one more than the index in `sites` of a site that had a NaN scale, in
              these rows or in earlier ones: rows with full scales show it themselves, rows with
              2-bit scales cannot
    sites     site and layer of every record of a row
    """

    count_1: Tensor
    rows_n: Tensor
    rows_nB: Tensor
    nan_1: Tensor
    sites: tuple[tuple[Site, int], ...]


class KVRows:
    """Turns slots of the pool into rows of the KV part, on the pool's device.

    The pool's buffers stay where they are for the life of the engine, so their addresses are looked
    up once.
    """

    def __init__(self, layout: RecordLayout, sites: list[PoolSite]) -> None:
        width = layout.shape.num_kv_heads * layout.shape.head_dim
        for each in sites:
            assert each.codes_PHd.is_contiguous()
            assert each.scales_PHb.is_contiguous()
            assert each.codes_PHd[0].nbytes == width // 2
            assert each.scales_PHb[0].nbytes == width // 16
        expected = {
            (site, layer) for site in (Site.K, Site.V) for layer in layout.site_layers(site)
        }
        assert {(each.site, each.layer) for each in sites} == expected
        self._layout = layout
        self._sites = sites  # keeps the buffers alive
        self._width = width
        self._recorded = tuple((each.site, each.layer) for each in sites)
        device = sites[0].codes_PHd.device
        self._nan_1 = torch.zeros(1, dtype=torch.int32, device=device)
        columns = [layout.columns(each.site, each.layer).start for each in sites]
        table = [
            [each.codes_PHd.data_ptr(), each.scales_PHb.data_ptr(), column]
            for each, column in zip(sites, columns, strict=True)
        ]
        self._table_S3 = torch.tensor(table, dtype=torch.int64, device=device)

    def gather(self, slots_n: Tensor, rows_n: Tensor, due_n: Tensor) -> DueRows:
        """Read the slots that are due; does not wait for the device, which alone knows how many.

        Must run before the slots are given back.

        Args:
            slots_n: int32 or int64 [n], n at least 1.
            rows_n: int64 [n], the row number of each.
            due_n: bool [n].
        """
        count = len(slots_n)
        # Counted from one.
        places_n = due_n.cumsum(0)
        shape = (count, self._layout.row_bytes(Part.KV))
        due = DueRows(
            places_n[-1:],
            torch.empty_like(rows_n),
            torch.empty(shape, dtype=torch.uint8, device=slots_n.device),
            self._nan_1,
            self._recorded,
        )
        groups = self._width // 8
        _gather[(count, len(self._sites))](
            self._table_S3,
            slots_n.contiguous(),
            rows_n.contiguous(),
            due_n.contiguous().view(torch.uint8),
            places_n,
            due.rows_n,
            due.rows_nB,
            due.rows_nB.stride(0),
            self._nan_1,
            GROUPS=groups,
            PADDED=triton.next_power_of_2(groups),
            BITS=self._layout.bits,
            SCALE_BITS=self._layout.scale_bits,
        )
        return due


@triton.jit
def _gather(
    table,
    slots,
    numbers,
    due,
    places,
    numbers_out,
    rows_out,
    row_bytes,
    nan_seen,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_BITS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    if tl.load(due + at) == 0:
        return
    row = tl.load(places + at) - 1
    if tl.program_id(1) == 0:
        tl.store(numbers_out + row, tl.load(numbers + at))
    entry = table + tl.program_id(1) * 3
    codes = tl.load(entry).to(tl.pointer_type(tl.uint8))
    scales = tl.load(entry + 1).to(tl.pointer_type(tl.uint8))
    slot = tl.load(slots + at).to(tl.int64)
    cell = rows_out + row * row_bytes + tl.load(entry + 2)
    group_C = tl.arange(0, PADDED)
    live_C = group_C < GROUPS
    byte_4 = tl.arange(0, 4)[None, :]
    packed_C4 = tl.load(
        codes + slot * (GROUPS * 4) + group_C[:, None] * 4 + byte_4, mask=live_C[:, None], other=0
    ).to(tl.int32)
    for bit in tl.static_range(BITS):
        low_C4 = ((packed_C4 >> bit) & 1) << (2 * byte_4)
        high_C4 = ((packed_C4 >> (4 + bit)) & 1) << (2 * byte_4 + 1)
        plane_C = tl.sum(low_C4 | high_C4, axis=1)
        tl.store(cell + bit * GROUPS + group_C, plane_C.to(tl.uint8), mask=live_C)
    # A block of 16 code words is two groups of eight.
    SCALES: tl.constexpr = GROUPS // 2
    scale_S = tl.arange(0, PADDED // 2)
    code_S = tl.load(scales + slot * SCALES + scale_S, mask=scale_S < SCALES, other=0).to(tl.int32)
    write_scales(cell + BITS * GROUPS, code_S, scale_S < SCALES, PADDED // 2, SCALES, SCALE_BITS)
    if tl.max(((code_S & 0x7F) == 0x7F).to(tl.int32), axis=0) > 0:
        tl.store(nan_seen, tl.program_id(1) + 1)
