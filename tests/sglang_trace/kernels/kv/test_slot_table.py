"""The copy of SGLang's slot table that a decode graph reads."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trace.kernels.kv.slot_table import copy_kv_slots
from tests.sglang_trace.kernels.inputs import DEVICE


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.sampled_from((0, 1, 1023, 1024, 1025, 17000, 20000)), max_size=3),
    seed=st.integers(0, 1000),
)
def test_each_row_is_copied_to_its_length_and_no_further(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 1 << 30, (5, 20000), generator=generator, dtype=torch.int32)
    rows = torch.randint(0, 5, (len(lengths),), generator=generator)
    expected = torch.full((4, 20000), -1, dtype=torch.int32)
    for at, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        expected[at, :length] = table[row, :length]
    copy = torch.full((4, 20000), -1, dtype=torch.int32, device=DEVICE)
    of = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    copy_kv_slots(table.to(DEVICE), rows.to(DEVICE), of, copy)
    assert torch.equal(copy.cpu(), expected)
