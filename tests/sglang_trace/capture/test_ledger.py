"""The ledger against a plain model of a KV pool with prefix sharing, retraction and reuse."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_trace.capture.ledger import NO_ROW, Ledger, Span

SLOTS = 40


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.long)


def due(ledger: Ledger, rid: str, *slots: int) -> list[bool]:
    slots_T = slots_of(*slots)
    due_T: list[bool] = ledger.take_due_kv(ledger.read(rid, slots_T), slots_T).tolist()
    return due_T


def test_a_prefix_found_in_the_cache_keeps_the_rows_that_filled_it() -> None:
    ledger = Ledger(SLOTS)
    ledger.record(slots_of(5, 6, 7), [Span("a", 0, 3)])
    ledger.record(slots_of(8), [Span("b", 2, 1)])
    assert ledger.read("b", slots_of(5, 6, 8)).tolist() == [0, 1, 3]


def test_a_request_keeps_its_own_row_where_the_cache_swapped_its_slot() -> None:
    ledger = Ledger(SLOTS)
    ledger.record(slots_of(5, 6, 7, 8), [Span("a", 0, 2), Span("b", 0, 2)])
    assert ledger.read("b", slots_of(5, 6)).tolist() == [2, 3]
    assert due(ledger, "b", 5, 6) == [True, True]
    assert due(ledger, "a", 5, 6) == [True, True]


def test_keys_and_values_are_due_once_a_row() -> None:
    ledger = Ledger(SLOTS)
    ledger.record(slots_of(5, 6, 7), [Span("a", 0, 3)])
    assert due(ledger, "a", 5, 6) == [True, True]
    assert due(ledger, "a", 5, 6, 7) == [False, False, True]
    ledger.record(slots_of(6), [Span("c", 0, 1)])
    assert due(ledger, "c", 6) == [True]


def test_a_slot_that_was_never_filled_has_no_row_and_nothing_due() -> None:
    ledger = Ledger(SLOTS)
    assert ledger.read("a", slots_of(3)).tolist() == [NO_ROW]
    assert due(ledger, "a", 3) == [False]


@dataclass
class Running:
    hit: int
    slots: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class Pool(RuleBasedStateMachine):
    """Requests that run, share a finished request's prefix, swap slots, retract and end.

    The model keeps lists where the ledger keeps tensors, and the content of every slot as the row
    that was written last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(SLOTS)
        self.free = list(range(1, SLOTS))
        self.content: dict[int, int] = {}
        self.running: dict[str, Running] = {}
        self.cached: list[int] = []
        self.sent: set[tuple[int, int]] = set()
        self.next_row = 0
        self.made = 0

    @precondition(lambda self: len(self.free) >= 4)
    @rule(prompt=st.integers(1, 4), hit=st.integers(0, 8))
    def prefill(self, prompt: int, hit: int) -> None:
        rid = f"r{self.made}"
        self.made += 1
        shared = self.cached[:hit]
        request = Running(len(shared), list(shared), [self.content[slot] for slot in shared])
        self.running[rid] = request
        self._compute([(rid, prompt)])

    @precondition(lambda self: self.running and len(self.free) >= len(self.running))
    @rule()
    def decode(self) -> None:
        self._compute([(rid, 1) for rid in self.running])

    @precondition(lambda self: len(self.running) > 1)
    @rule(data=st.data())
    def swap_for_an_equal_prefix(self, data: st.DataObject) -> None:
        """The prefix cache replaces slots that a request filled by another's and frees them.

        Slots that were found in the cache are locked and stay.
        """
        kept, swapped = data.draw(
            st.permutations(sorted(self.running)).map(lambda names: names[:2])
        )
        theirs, ours = self.running[kept].slots, self.running[swapped].slots
        part = slice(
            self.running[swapped].hit, data.draw(st.integers(0, min(len(theirs), len(ours))))
        )
        released = [slot for slot in ours[part] if not self._in_use(slot, besides=swapped)]
        ours[part] = theirs[part]
        self.free += released

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        """A request finishes (its prefix stays cached) or is retracted (its slots are reused)."""
        rid = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running[rid]
        assert self.ledger.read(rid, slots_of(*request.slots)).tolist() == request.rows
        self._check_due(request, due(self.ledger, rid, *request.slots))
        self.ledger.forget(rid)
        del self.running[rid]
        previous, self.cached = self.cached, list(request.slots) if keep else self.cached
        left = {slot for slot in [*previous, *request.slots] if not self._in_use(slot)}
        self.free += sorted(left - set(self.free))

    @invariant()
    def rows_are_counted_like_the_model(self) -> None:
        assert self.ledger.next_row == self.next_row

    def _compute(self, work: list[tuple[str, int]]) -> None:
        spans, slots = [], []
        for rid, length in work:
            request = self.running[rid]
            spans.append(Span(rid, len(request.slots), length))
            for _ in range(length):
                slot = self.free.pop(0)
                self.content[slot] = self.next_row
                request.slots.append(slot)
                request.rows.append(self.next_row)
                slots.append(slot)
                self.next_row += 1
        self.ledger.record(torch.tensor(slots), spans)

    def _check_due(self, request: Running, due: list[bool]) -> None:
        """After a read every row of the request has been sent, with what its slot held."""
        for slot, row, is_due in zip(request.slots, request.rows, due, strict=True):
            if is_due:
                self.sent.add((row, self.content[slot]))
            assert (row, self.content[slot]) in self.sent

    def _in_use(self, slot: int, besides: str = "") -> bool:
        users = (request.slots for rid, request in self.running.items() if rid != besides)
        return slot in self.cached or any(slot in slots for slots in users)


Pool.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestPool = Pool.TestCase
