"""Every fault of the table a few times; `python -m tests.faults.table` repeats each 100 times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fault import Fault
from tests.faults.repeat import repeat, seeds_of
from tests.faults.table import FAULTS

_REPETITIONS = 2
_STOP_S = 1.0
# Twenty seconds each, for figures that the table states: see benchmarks/results/cpu/faults.json.
_TABLE_ONLY = ("memory: daemon",)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=f"{fault.name}, {fault.tier}")
        for fault in FAULTS
        if not fault.name.startswith(_TABLE_ONLY)
    ],
)
def test_nothing_acknowledged_is_lost_nothing_wrong_is_served_nothing_hangs(
    fault: Fault, tmp_path: Path
) -> None:
    seeds = seeds_of(fault, 1, _REPETITIONS)
    row = repeat(fault, seeds, stop_s=_STOP_S, scratch=tmp_path)
    if row.skipped:
        pytest.skip(row.skipped)
    assert not row.violations
    assert row.outcome.met
