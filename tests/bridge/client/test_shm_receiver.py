"""A buffer belongs to one answer at a time, and what stands there is what the bridge sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bridge.client.shm_receiver import ShmReceiver
from bridge.errors import CorruptMessage
from bridge.layout import Part
from bridge.transport.shared_memory import STAMP_BYTES, ShmSegment, opened, stamp
from bridge.wire import BufferHandle, ShmPageRows

_BUFFERS, _BYTES = 3, 4096


class Lending(RuleBasedStateMachine):
    """Answers begin, end, are given up and are broken off, in any order."""

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(
            "bridge.client.shm_receiver.ShmSegment", lambda: ShmSegment(_BUFFERS, _BYTES)
        )
        self.receiver = ShmReceiver()
        self.next = 0
        self.in_use: dict[int, BufferHandle] = {}
        self.abandoned: set[BufferHandle] = set()
        self.old_keys: set[str] = set()

    @rule()
    def acquire(self) -> None:
        buffer = self.receiver.acquire(self.next)
        if buffer is None:
            # All buffers of the segment are in use or abandoned, and one is still needed.
            assert self.in_use
            assert len(self.in_use) + len(self.abandoned) == _BUFFERS
        else:
            if not self.in_use and self.abandoned:
                self._anew()
            assert buffer not in self.in_use.values()
            assert buffer not in self.abandoned
            assert buffer.key not in self.old_keys
            assert all(buffer.key == each.key for each in self.in_use.values())
            self.in_use[self.next] = buffer
        self.next += 1

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seq = self._some(data)
        self.receiver.release(seq)
        self.in_use.pop(seq, None)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        seq = self._some(data)
        self.receiver.abandon(seq)
        if seq in self.in_use:
            self.abandoned.add(self.in_use.pop(seq))

    @rule()
    def start_anew(self) -> None:
        self.receiver.close()
        self.in_use.clear()
        self._anew()

    @invariant()
    def places_lie_apart(self) -> None:
        held = sorted(
            (buffer.offset, buffer.nbytes) for buffer in [*self.in_use.values(), *self.abandoned]
        )
        ends = [offset + nbytes for offset, nbytes in held]
        assert all(end <= offset for end, (offset, _) in zip(ends, held[1:], strict=False))

    def teardown(self) -> None:
        """All buffers come back: an answer after the others finds the whole segment free."""
        for seq in [*self.in_use]:
            self.receiver.release(seq)
        buffers = [self.receiver.acquire(self.next + number) for number in range(_BUFFERS + 1)]
        assert None not in buffers[:-1]
        assert len(set(buffers)) == _BUFFERS + 1
        assert buffers[-1] is None
        self.receiver.close()
        self.patch.undo()

    def _anew(self) -> None:
        self.old_keys |= {buffer.key for buffer in self.abandoned}
        self.abandoned.clear()

    def _some(self, data: st.DataObject) -> int:
        """An answer that is under way, or any other."""
        drawn: int = data.draw(st.sampled_from([*self.in_use, -1, self.next]))
        return drawn


TestLending = Lending.TestCase


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmReceiver]:
    monkeypatch.setattr(
        "bridge.client.shm_receiver.ShmSegment", lambda: ShmSegment(_BUFFERS, _BYTES)
    )
    with closing(ShmReceiver()) as made:
        yield made


def _placed(rows: bytes, at: int = 0, row_bytes: int = 4, stamp: int = 0) -> ShmPageRows:
    count = len(rows) // row_bytes
    return ShmPageRows(Part.KV, 0, np.ones(count, np.bool_), row_bytes, at, stamp)


def _written(buffer: BufferHandle | None, rows: bytes, at: int = 0) -> tuple[memoryview, int]:
    """What a bridge does with a buffer: (the buffer, its stamp)."""
    assert buffer is not None
    memory = opened(buffer)
    assert memory is not None
    there = memory[buffer.offset : buffer.offset + STAMP_BYTES + buffer.nbytes]
    stamped = stamp(there)
    there[STAMP_BYTES + at : STAMP_BYTES + at + len(rows)] = rows
    return there, stamped


def test_rows_are_seen_where_the_bridge_wrote_them(receiver: ShmReceiver) -> None:
    _written(receiver.acquire(0), b"other rows..")
    _, stamped = _written(receiver.acquire(1), b"rows" * 3, at=8)
    placed = _placed(b"rows" * 3, at=8, stamp=stamped)
    rows = receiver.rows(1, placed)
    assert (rows.part, rows.begin, rows.valid.tolist()) == (Part.KV, 0, [True] * 3)
    assert [row.tobytes() for row in rows.rows] == [b"rows"] * 3
    receiver.check(1, placed)


def test_missing_rows_take_no_bytes(receiver: ShmReceiver) -> None:
    _, stamped = _written(receiver.acquire(0), b"")
    placed = ShmPageRows(Part.KV, 3, np.zeros(2, np.bool_), 4, _BYTES, stamped)
    rows = receiver.rows(0, placed)
    receiver.check(0, placed)
    assert rows.rows.shape == (0, 4)


@pytest.mark.parametrize("at", [_BYTES - 11, _BYTES, 1 << 27])
def test_rows_outside_a_place_are_corrupt(receiver: ShmReceiver, at: int) -> None:
    receiver.acquire(0)
    with pytest.raises(CorruptMessage, match="not offered for them"):
        receiver.rows(0, _placed(b"rows" * 3, at=at))


def test_rows_of_an_answer_that_was_lent_nothing_are_corrupt(receiver: ShmReceiver) -> None:
    with pytest.raises(CorruptMessage, match="not offered for them"):
        receiver.rows(0, _placed(b"rows"))
    receiver.acquire(1)
    for seq, end in ((2, receiver.release), (3, receiver.abandon)):
        receiver.acquire(seq)
        end(seq)
        with pytest.raises(CorruptMessage, match="not offered for them"):
            receiver.rows(seq, _placed(b"rows"))


def test_a_place_that_is_written_again_while_rows_are_copied_is_found(
    receiver: ShmReceiver,
) -> None:
    there, stamped = _written(receiver.acquire(0), b"rows" * 3)
    placed = _placed(b"rows" * 3, stamp=stamped)
    receiver.rows(0, placed)
    receiver.check(0, placed)
    assert stamp(there) != stamped
    with pytest.raises(CorruptMessage, match="fetch again"):
        receiver.check(0, placed)


def test_a_system_without_such_memory_is_asked_once_and_the_socket_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def refused() -> ShmSegment:
        tried.append(True)
        raise OSError("no memory")

    monkeypatch.setattr("bridge.client.shm_receiver.ShmSegment", refused)
    receiver = ShmReceiver()
    assert [receiver.acquire(seq) for seq in range(3)] == [None] * 3
    assert len(tried) == 1
    receiver.close()
