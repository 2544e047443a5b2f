from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_trace.capture.row_buffer import Gathered, RowBuffer


@given(
    capacity=st.integers(0, 9),
    passes=st.lists(st.one_of(st.integers(1, 12), st.none()), max_size=20),
)
def test_every_row_leaves_once_in_order_whatever_is_written_there_next(
    capacity: int, passes: list[int | None]
) -> None:
    """A pass is its number of rows; None takes what is there, as the end of a request does."""
    block, staging = RowBuffer(capacity), torch.empty(12, 3, dtype=torch.uint8)
    left: list[Gathered] = []
    made = 0
    for count in [*passes, None]:
        if count is None:
            left += block.take()
            continue
        rows = staging[:count]
        rows.copy_(torch.arange(made, made + count).unsqueeze(1).expand(count, 3))
        left += block.add(made, rows)
        made += count
        staging.fill_(255)
    numbers = [each.first + at for each in left for at in range(len(each.rows()))]
    assert numbers == list(range(made))
    values = torch.cat([torch.empty(0, 3, dtype=torch.uint8), *(each.rows() for each in left)])
    assert torch.equal(values, torch.arange(made, dtype=torch.uint8).unsqueeze(1).expand(made, 3))
    assert block.take() == []


def test_small_passes_leave_together_and_a_large_one_by_itself() -> None:
    block = RowBuffer(4)
    rows = torch.zeros(5, 3, dtype=torch.uint8)
    assert block.add(0, rows[:2]) == []
    assert block.add(2, rows[:2]) == []
    (both,) = block.add(4, rows[:1])
    assert (both.first, len(both.rows())) == (0, 4)
    before, large = block.add(5, rows)
    assert [(before.first, len(before.rows())), (large.first, len(large.rows()))] == [
        (4, 1),
        (5, 5),
    ]


def test_a_block_counts_with_all_its_memory_however_few_rows_it_has() -> None:
    block = RowBuffer(4)
    block.add(0, torch.zeros(1, 3, dtype=torch.uint8))
    (few,) = block.take()
    assert few.nbytes == 4 * 3


def test_on_a_cpu_every_pass_leaves_at_once() -> None:
    (only,) = RowBuffer.on("cpu", row_bytes=3).add(7, torch.zeros(1, 3, dtype=torch.uint8))
    assert only.first == 7
    assert only.ready is None
