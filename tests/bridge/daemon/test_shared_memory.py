"""The daemon keeps a bounded number of clients' regions, and writes within the place it is lent."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.daemon.fetch.answer import _page
from bridge.daemon.fetch.gather import Chunk
from bridge.daemon.fetch.shm_writer import ShmWriter
from bridge.daemon.memory import shared_memory
from bridge.daemon.memory.shared_memory import ShmSegments
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.transport.shared_memory import STAMP_BYTES, ShmSegment, stamped
from bridge.wire import BufferHandle, PageRows

_PAGE = mmap.PAGESIZE
_SEQS = count()  # of questions
_REST = 2 * (STAMP_BYTES + _PAGE)  # of a region of two places of a page


@pytest.fixture
def lend() -> Iterator[Callable[[], BufferHandle]]:
    """lend() -> a place of a region of its own."""
    made: list[ShmSegment] = []

    def one() -> BufferHandle:
        made.append(ShmSegment(buffers=2, buffer_bytes=_PAGE))
        place = made[-1].acquire()
        assert place is not None
        return place

    yield one
    for region in made:
        region.close()


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the regions that were opened or tried."""
    keys: list[str] = []
    opened = shared_memory.opened

    def counting(place: BufferHandle) -> memoryview | None:
        keys.append(place.key)
        return opened(place)

    monkeypatch.setattr(shared_memory, "opened", counting)
    return keys


def _rows(*fill: int, begin: int = 0, width: int = 8) -> PageRows:
    rows = np.repeat(np.array(fill, dtype=np.uint8), width).reshape(-1, width)
    return PageRows(Part.KV, begin, np.ones(len(fill), np.bool_), rows)


def test_a_region_is_opened_once_for_all_places_and_questions(
    lend: Callable[[], BufferHandle], opens: list[str]
) -> None:
    held, place = ShmSegments(), lend()
    other = replace(place, offset=place.offset - _PAGE)
    for _ in range(3):
        for each in (place, other):
            target = held.target(b"a", each, next(_SEQS))
            assert target is not None
            assert target.nbytes == STAMP_BYTES + _PAGE
    assert opens == [place.key]


def test_a_new_region_takes_the_place_of_a_clients_old_one(
    lend: Callable[[], BufferHandle], opens: list[str]
) -> None:
    held, old, new, of_another = ShmSegments(), lend(), lend(), lend()
    for peer, place in ((b"a", old), (b"b", of_another), (b"a", new), (b"b", of_another)):
        assert held.target(peer, place, next(_SEQS)) is not None
    assert opens == [old.key, of_another.key, new.key]
    assert len(held._open) == 2


def test_what_is_out_of_reach_is_not_tried_with_every_question(
    lend: Callable[[], BufferHandle], opens: list[str]
) -> None:
    held, lost = ShmSegments(), replace(lend(), key="0" * 32)
    assert [held.target(b"a", lost, next(_SEQS)) for _ in range(3)] == [None] * 3
    assert opens == [lost.key]
    assert held.target(b"a", lend(), next(_SEQS)) is not None


def test_without_a_place_nothing_is_opened(opens: list[str]) -> None:
    held = ShmSegments()
    assert held.target(b"a", None, next(_SEQS)) is None
    assert not opens
    assert not held._open


def test_no_more_regions_are_held_than_stated_and_the_longest_unused_goes(
    lend: Callable[[], BufferHandle], opens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared_memory._MAX_OPEN == 64
    monkeypatch.setattr(shared_memory, "_MAX_OPEN", 3)
    held, places = ShmSegments(), [lend() for _ in range(4)]
    for number in (0, 1, 2, 0, 3):  # 1 is the longest unused when 3 comes
        assert held.target(bytes([number]), places[number], next(_SEQS)) is not None
    assert list(held._open) == [b"\2", b"\0", b"\3"]
    opens.clear()
    for number in (2, 0, 3, 1):
        assert held.target(bytes([number]), places[number], next(_SEQS)) is not None
    assert opens == [places[1].key]


def test_regions_that_are_not_used_are_let_go(
    lend: Callable[[], BufferHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("bridge.daemon.memory.shared_memory.time.monotonic", lambda: now[0])
    held, idle, busy = ShmSegments(), lend(), lend()
    held.target(b"idle", idle, next(_SEQS))
    held.target(b"busy", busy, next(_SEQS))
    held.target(b"lost", replace(busy, key="0" * 32), next(_SEQS))
    now[0] += shared_memory._IDLE_S * 0.6
    held.target(b"busy", busy, next(_SEQS))
    held.tick()
    assert set(held._open) == {b"idle", b"busy", b"lost"}
    now[0] += shared_memory._IDLE_S * 0.6
    held.tick()
    assert set(held._open) == {b"busy"}
    assert held.target(b"idle", idle, next(_SEQS)) is not None


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(_PAGE, _REST - STAMP_BYTES + 1), (_PAGE + _REST - STAMP_BYTES, 1), (1 << 27, 1)],
)
def test_a_place_beyond_the_region_is_none(
    lend: Callable[[], BufferHandle], offset: int, nbytes: int
) -> None:
    held, place = ShmSegments(), lend()
    assert held.target(b"a", replace(place, offset=offset, nbytes=nbytes), next(_SEQS)) is None
    assert (
        held.target(b"a", replace(place, offset=_PAGE, nbytes=_REST - STAMP_BYTES), next(_SEQS))
        is not None
    )


def _piece(begin: int, valid: list[bool], rows: list[bytes]) -> Chunk:
    """A chunk of rows of six bytes, each in a payload of its own."""
    payloads = [memoryview(row) for row in rows]
    begins, counts = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64)
    return Chunk(begin, np.array(valid), payloads, begins, counts, 6, np.array([[0, 6]]), 6)


def test_pieces_are_written_behind_each_other_and_told_with_the_places_stamp() -> None:
    memory = memoryview(bytearray(STAMP_BYTES + 100))
    writer = ShmWriter(memory[10 : STAMP_BYTES + 90])
    first = writer.take(_rows(1, 2))
    second = writer.put(Part.FORWARD, _piece(2, [True, False, True], [b"abcdef", b"ghijkl"]))
    empty = writer.put(Part.FORWARD, _piece(5, [False] * 4, []))
    third = writer.take(_rows(3, begin=9))
    written = [bytes([1] * 8 + [2] * 8), b"abcdefghijkl", b"", bytes([3] * 8)]
    assert bytes(memory[:10]) == bytes(10)
    assert bytes(memory[10 + STAMP_BYTES :]) == b"".join(written) + bytes(90 - 36)
    placed = (first, second, empty, third)
    assert [each.at for each in placed] == [0, 16, 28, 28]
    assert [each.nbytes for each in placed] == [len(rows) for rows in written]
    assert {each.stamp for each in placed} == {stamped(memory[10:])}
    assert (second.part, second.begin, second.count, second.row_bytes) == (Part.FORWARD, 2, 2, 6)


def test_a_place_has_its_new_stamp_before_anything_is_written_there() -> None:
    memory = memoryview(bytearray(STAMP_BYTES + 100))
    told = ShmWriter(memory).take(_rows(1, 2))
    assert stamped(memory) == told.stamp
    again = ShmWriter(memory)
    assert stamped(memory) != told.stamp
    assert again.take(_rows(1, 2)).stamp == stamped(memory)


def test_nothing_is_ever_written_behind_a_place() -> None:
    memory = memoryview(bytearray(STAMP_BYTES + 100))
    writer = ShmWriter(memory[: STAMP_BYTES + 20])
    writer.take(_rows(1, 2))
    with pytest.raises(ValueError, match="memoryview assignment"):
        writer.take(_rows(3))
    assert not any(memory[STAMP_BYTES + 16 :])


@st.composite
def _layouts(draw: st.DrawFn) -> RecordLayout:
    layers = tuple(range(draw(st.integers(1, 3))))
    shape = ModelShape(
        len(layers),
        64 * draw(st.integers(1, 4)),
        16 * draw(st.integers(1, 8)),
        8,
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 4])),
        16 * draw(st.integers(1, 4)),
        layers,
        layers,
    )
    sites = draw(st.sets(st.sampled_from(list(Site)), min_size=1))
    return RecordLayout(
        shape, layers, sorted(sites, key=list(Site).index), bits=draw(st.integers(1, 4))
    )


@given(
    _layouts(),
    st.integers(0, 20_000),
    st.integers(0, 5000),
    st.integers(0, 5000),
)
def test_the_rows_of_a_page_fit_the_place_that_is_lent_for_them(
    layout: RecordLayout, nbytes: int, start: int, count: int
) -> None:
    writer = ShmWriter(memoryview(bytearray(STAMP_BYTES + nbytes)))
    page = _page(start, start + count, layout, writer)
    assert page.start == start
    assert page.stop - start >= min(1, count)
    one = layout.bytes_per_token()
    if nbytes >= one:
        assert (page.stop - start) * one <= nbytes
