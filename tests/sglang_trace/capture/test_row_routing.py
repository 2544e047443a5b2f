"""Rows keep the number that the ledger gave them, however passes are cut into what is shipped."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge.transport.bridge_sharding import counts_of, shard_of, shards_of
from sglang_trace.capture.ledger import Ledger, Span
from sglang_trace.capture.row_routing import RowRouter

SLOTS = 400
_PASSES = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=4), max_size=8
)


@given(_PASSES, st.integers(1, 3), st.data())
def test_shipped_rows_have_the_ledgers_numbers(
    passes: list[list[tuple[int, int]]], bridges: int, data: st.DataObject
) -> None:
    router, ledger, filled = RowRouter(bridges), Ledger(SLOTS), 1
    expected: list[int] = []
    for requests in passes:
        spans = [
            Span(f"t{rid}", 0, length, shard_of(f"t{rid}", bridges)) for rid, length in requests
        ]
        count = sum(span.length for span in spans)
        slots = torch.arange(filled, filled + count)
        first = ledger.record(slots, spans)
        router.keep(first, spans)
        filled += count
        expected += ledger.read("nobody", slots).tolist()
        assert shards_of(ledger.read("nobody", slots).numpy()).tolist() == [
            shard_of(f"t{rid}", bridges) for rid, length in requests for _ in range(length)
        ]
        for span in spans:
            last = ledger.own_rows(span.request, span.length)
            assert set(shards_of(last.numpy())) == {span.shard}
    shipped: list[int] = []
    while len(shipped) < len(expected):
        count = data.draw(st.integers(1, len(expected) - len(shipped)))
        shipped += router.numbers(len(shipped), count).tolist()
    assert shipped == expected
    assert [counts_of(row) for row in shipped] == list(range(len(shipped)))
    assert not router._spans


def test_padding_has_a_number_too() -> None:
    ledger = Ledger(SLOTS)
    ledger.record(torch.tensor([3, 4, 0, 0]), [Span("a", 0, 2, shard=1)])
    assert ledger.next_row == 4
    rows = ledger.read("nobody", torch.tensor([3, 4]))
    assert (counts_of(rows.numpy()).tolist(), shards_of(rows.numpy()).tolist()) == ([0, 1], [1, 1])
