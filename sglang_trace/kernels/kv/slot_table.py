"""Copy the slots of a batch's requests out of SGLang's table before a decode graph starts.

SGLang's scheduler goes on to write its table as soon as a decode graph has been launched, because
its own backends have copied by then what they read (0.5.17: the event that its decode runner
records before the replay). So what a graph reads is a copy of ours.

Shape legend: R rows of SGLang's table, C positions of a row, M rows of the copy, B requests.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_A_ROW = 16
_SLOTS_AT_ONCE = 1024


def copy_kv_slots(table_RC: Tensor, rows_B: Tensor, lengths_B: Tensor, copy_MC: Tensor) -> None:
    """Copy the first `lengths_B` entries of rows `rows_B` to rows 0 to B of `copy_MC`.

    What lies beyond a length stays as it was. Does not wait for the device.

    Args:
        table_RC: int32 [R, C].
        rows_B: int32 or int64 [B].
        lengths_B: int32 or int64 [B], at most C.
        copy_MC: int32 [M, C], M >= B, written.
    """
    assert table_RC.dtype == copy_MC.dtype
    assert table_RC.shape[1] == copy_MC.shape[1]
    assert table_RC.stride(1) == copy_MC.stride(1) == 1
    assert len(copy_MC) >= len(rows_B) == len(lengths_B)
    if len(rows_B):
        _copy_slots[(_PROGRAMS_A_ROW, len(rows_B))](
            table_RC,
            rows_B,
            lengths_B,
            copy_MC,
            table_RC.stride(0),
            copy_MC.stride(0),
            PROGRAMS=_PROGRAMS_A_ROW,
            SLOTS=_SLOTS_AT_ONCE,
        )


@triton.jit
def _copy_slots(
    table,
    rows,
    lengths,
    copy,
    table_row,
    copy_row,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    source = table + tl.load(rows + request).to(tl.int64) * table_row
    target = copy + request * copy_row
    for first in range(tl.program_id(0) * SLOTS, length, PROGRAMS * SLOTS):
        at = first + tl.arange(0, SLOTS)
        live = at < length
        tl.store(target + at, tl.load(source + at, mask=live, other=0), mask=live)
