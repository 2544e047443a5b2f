"""Every fault of the table a few times; `python -m tests.faults.table` repeats each 100 times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import persistence, schema, tampered
from tests.faults.fault import Fault
from tests.faults.repeat import repeat, seeds_of
from tests.faults.table import FAULTS

_REPETITIONS = 2
_STOP_S = 1.0
# Of the failpoints: calls from all over each work.
_ALL, _FIRST_CALL, _EVERY_CALL = 100, 7, 60
# They take most of the time of the table and tell least in two repetitions.
_TABLE_ONLY = ("memory: daemon", "memory: trainer")
# What tampers sits in front of the store.
_IN_MEMORY_ALONE = (*tampered.FAULTS, *schema.FAULTS[1:])


def _chosen(fault: Fault) -> bool:
    if fault in _IN_MEMORY_ALONE:
        return fault.tier == "memory"
    return not fault.name.startswith(_TABLE_ONLY)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=f"{fault.name}, {fault.tier}") for fault in FAULTS if _chosen(fault)],
)
def test_nothing_acknowledged_is_lost_nothing_wrong_is_served_nothing_hangs(
    fault: Fault, tmp_path: Path
) -> None:
    seeds = seeds_of(fault, 1, _REPETITIONS)
    if fault in persistence.FAULTS:
        seeds = seeds_of(fault, 1, _ALL)[_FIRST_CALL::_EVERY_CALL]
    row = repeat(fault, seeds, stop_s=_STOP_S, scratch=tmp_path)
    if row.skipped:
        pytest.skip(row.skipped)
    assert not row.violations
    assert row.outcome.met
