"""A place is lent to one answer at a time, and what stands there is what the bridge sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bridge.client.shm_receiver import Lender
from bridge.errors import CorruptMessage
from bridge.layout import Part
from bridge.transport.shared_memory import STAMP_BYTES, Region, opened, stamp
from bridge.wire import Place, PlacedRows

_PLACES, _BYTES = 3, 4096


class Lending(RuleBasedStateMachine):
    """Answers begin, end, are given up and are broken off, in any order."""

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("bridge.client.shm_receiver.Region", lambda: Region(_PLACES, _BYTES))
        self.lender = Lender()
        self.next = 0
        self.lent: dict[int, Place] = {}
        self.abandoned: set[Place] = set()
        self.old_keys: set[str] = set()

    @rule()
    def lend(self) -> None:
        place = self.lender.lend(self.next)
        if place is None:
            # All places of the region are lent or abandoned, and one is still needed.
            assert self.lent
            assert len(self.lent) + len(self.abandoned) == _PLACES
        else:
            if not self.lent and self.abandoned:
                self._anew()
            assert place not in self.lent.values()
            assert place not in self.abandoned
            assert place.key not in self.old_keys
            assert all(place.key == each.key for each in self.lent.values())
            self.lent[self.next] = place
        self.next += 1

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seq = self._some(data)
        self.lender.take_back(seq)
        self.lent.pop(seq, None)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        seq = self._some(data)
        self.lender.abandon(seq)
        if seq in self.lent:
            self.abandoned.add(self.lent.pop(seq))

    @rule()
    def start_anew(self) -> None:
        self.lender.close()
        self.lent.clear()
        self._anew()

    @invariant()
    def places_lie_apart(self) -> None:
        held = sorted(
            (place.offset, place.nbytes) for place in [*self.lent.values(), *self.abandoned]
        )
        ends = [offset + nbytes for offset, nbytes in held]
        assert all(end <= offset for end, (offset, _) in zip(ends, held[1:], strict=False))

    def teardown(self) -> None:
        """All places come back: an answer after the others finds the whole region free."""
        for seq in [*self.lent]:
            self.lender.take_back(seq)
        lent = [self.lender.lend(self.next + number) for number in range(_PLACES + 1)]
        assert None not in lent[:-1]
        assert len(set(lent)) == _PLACES + 1
        assert lent[-1] is None
        self.lender.close()
        self.patch.undo()

    def _anew(self) -> None:
        self.old_keys |= {place.key for place in self.abandoned}
        self.abandoned.clear()

    def _some(self, data: st.DataObject) -> int:
        """An answer that is under way, or any other."""
        drawn: int = data.draw(st.sampled_from([*self.lent, -1, self.next]))
        return drawn


TestLending = Lending.TestCase


@pytest.fixture
def lender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lender]:
    monkeypatch.setattr("bridge.client.shm_receiver.Region", lambda: Region(_PLACES, _BYTES))
    with closing(Lender()) as made:
        yield made


def _placed(rows: bytes, at: int = 0, row_bytes: int = 4, stamp: int = 0) -> PlacedRows:
    count = len(rows) // row_bytes
    return PlacedRows(Part.KV, 0, np.ones(count, np.bool_), row_bytes, at, stamp)


def _written(place: Place | None, rows: bytes, at: int = 0) -> tuple[memoryview, int]:
    """What a bridge does with a place: (the place, its stamp)."""
    assert place is not None
    memory = opened(place)
    assert memory is not None
    there = memory[place.offset : place.offset + STAMP_BYTES + place.nbytes]
    stamped = stamp(there)
    there[STAMP_BYTES + at : STAMP_BYTES + at + len(rows)] = rows
    return there, stamped


def test_rows_are_seen_where_the_bridge_wrote_them(lender: Lender) -> None:
    _written(lender.lend(0), b"other rows..")
    _, stamped = _written(lender.lend(1), b"rows" * 3, at=8)
    placed = _placed(b"rows" * 3, at=8, stamp=stamped)
    rows = lender.rows(1, placed)
    assert (rows.part, rows.begin, rows.valid.tolist()) == (Part.KV, 0, [True] * 3)
    assert [row.tobytes() for row in rows.rows] == [b"rows"] * 3
    lender.check(1, placed)


def test_missing_rows_take_no_bytes(lender: Lender) -> None:
    _, stamped = _written(lender.lend(0), b"")
    placed = PlacedRows(Part.KV, 3, np.zeros(2, np.bool_), 4, _BYTES, stamped)
    rows = lender.rows(0, placed)
    lender.check(0, placed)
    assert rows.rows.shape == (0, 4)


@pytest.mark.parametrize("at", [_BYTES - 11, _BYTES, 1 << 27])
def test_rows_outside_a_place_are_corrupt(lender: Lender, at: int) -> None:
    lender.lend(0)
    with pytest.raises(CorruptMessage, match="not lent to them"):
        lender.rows(0, _placed(b"rows" * 3, at=at))


def test_rows_of_an_answer_that_was_lent_nothing_are_corrupt(lender: Lender) -> None:
    with pytest.raises(CorruptMessage, match="not lent to them"):
        lender.rows(0, _placed(b"rows"))
    lender.lend(1)
    for seq, end in ((2, lender.take_back), (3, lender.abandon)):
        lender.lend(seq)
        end(seq)
        with pytest.raises(CorruptMessage, match="not lent to them"):
            lender.rows(seq, _placed(b"rows"))


def test_a_place_that_is_written_again_while_rows_are_copied_is_found(lender: Lender) -> None:
    there, stamped = _written(lender.lend(0), b"rows" * 3)
    placed = _placed(b"rows" * 3, stamp=stamped)
    lender.rows(0, placed)
    lender.check(0, placed)
    assert stamp(there) != stamped
    with pytest.raises(CorruptMessage, match="fetch again"):
        lender.check(0, placed)


def test_a_system_without_such_memory_is_asked_once_and_the_socket_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def refused() -> Region:
        tried.append(True)
        raise OSError("no memory")

    monkeypatch.setattr("bridge.client.shm_receiver.Region", refused)
    lender = Lender()
    assert [lender.lend(seq) for seq in range(3)] == [None] * 3
    assert len(tried) == 1
    lender.close()
