"""What the daemon reads out of a store is what was put there, chunk by chunk."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.daemon.fetch.gather import Gather
from bridge.index.tables.row_map import absent_locations
from bridge.store import CachedStore, DiskStore, Entry, MemoryStore, Store

_WIDTH = 24
_ROWS = 8  # of a block
_BLOCKS = 5
_COLUMNS = st.sampled_from(
    [(slice(0, 24),), (slice(3, 4),), (slice(0, 5), slice(9, 24)), (slice(4, 8), slice(16, 17)), ()]
)
# Positions as an engine makes them: runs of a prompt, single rows of decoding, and gaps.
_STRETCH = st.tuples(st.integers(-1, _BLOCKS), st.integers(0, _ROWS - 1), st.integers(1, _ROWS + 2))
_STRETCHES = st.lists(_STRETCH, max_size=12)


def _filled(store: Store) -> NDArray[np.uint8]:
    """Put all blocks; return what they hold, [block, row, byte]."""
    blocks = np.random.default_rng(0).integers(0, 256, (_BLOCKS, _ROWS, _WIDTH), dtype=np.uint8)
    store.append([Entry(b"header", block.reshape(-1).data, _WIDTH) for block in blocks])
    return blocks


def _locations(spans: list[tuple[int, int, int]]) -> NDArray[np.void]:
    """LOCATION of the rows of all spans (block, first row, rows)."""
    locations = absent_locations(sum(count for _, _, count in spans))
    at = 0
    for block, first, count in spans:
        locations["block"][at : at + count] = block
        locations["offset"][at : at + count] = np.arange(first, first + count)
        at += count
    return locations


def _expected(
    blocks: NDArray[np.uint8], locations: NDArray[np.void], columns: tuple[slice, ...]
) -> tuple[list[bool], list[bytes]]:
    valid, rows = [], []
    for block, offset in locations.tolist():
        valid.append(0 <= block < _BLOCKS and offset < _ROWS)
        if valid[-1]:
            rows.append(b"".join(blocks[block, offset, part].tobytes() for part in columns))
    return valid, rows


def _read(
    gather: Gather, columns: tuple[slice, ...], locations: NDArray[np.void]
) -> list[tuple[int, list[bool], NDArray[np.uint8]]]:
    """The chunks, each read before the next one is asked for: (begin, valid, rows)."""
    return [
        (chunk.begin, chunk.valid.tolist(), chunk.rows())
        for chunk in gather.chunks(_WIDTH, columns, locations)
    ]


def _check(
    gather: Gather,
    columns: tuple[slice, ...],
    locations: NDArray[np.void],
    valid: list[bool],
    rows: list[bytes],
) -> None:
    chunks = _read(gather, columns, locations)
    if not columns:
        assert chunks == []
        return
    ends = np.cumsum([0, *(len(which) for _, which, _ in chunks)]).tolist()
    assert [begin for begin, _, _ in chunks] == ends[: len(chunks)]
    assert [bit for _, which, _ in chunks for bit in which] == valid
    assert [row.tobytes() for _, _, read in chunks for row in read] == rows


@pytest.fixture(params=[1, 40, 1 << 20], autouse=True)
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.daemon.fetch.gather.CHUNK_BYTES", request.param)


@pytest.fixture(params=["memory", "disk", "memory over disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore(64 << 20)
    disk = DiskStore(tmp_path, 64 << 20)
    return disk if request.param == "disk" else CachedStore(disk, 64 << 20)


def test_rows_come_in_order_and_missing_ones_take_no_bytes(store: Store) -> None:
    blocks, gather = _filled(store), Gather(store)

    @given(_STRETCHES, _COLUMNS)
    def holds(spans: list[tuple[int, int, int]], columns: tuple[slice, ...]) -> None:
        # An index names no row beyond its block's end, as no message has more rows than bytes.
        within = [(b, first, min(n, _ROWS - first)) for b, first, n in spans]
        locations = _locations(within)
        valid, rows = _expected(blocks, locations, columns)
        _check(gather, columns, locations, valid, rows)
        together, which = gather.rows(_WIDTH, columns, locations)
        if columns:
            assert which.tolist() == valid
        assert [row.tobytes() for row in together[which]] == (rows if columns else [])
        assert not together[~which].any()

    holds()
    assert gather.corrupt_rows == 0
    store.close()


def test_places_beyond_the_end_of_a_block_are_missing(store: Store) -> None:
    _filled(store)
    ((_, valid, rows),) = _read(Gather(store), (slice(0, _WIDTH),), _locations([(1, _ROWS, 1)]))
    assert (valid, rows.shape) == ([False], (0, _WIDTH))
    store.close()


def test_damaged_rows_are_missing_wherever_a_piece_or_a_run_ends(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 64 << 20)
    blocks = _filled(store)
    store.close()
    damaged = {(0, 0), (2, 3), (2, 4), (4, 7)}
    with lmdb.open(str(tmp_path), max_dbs=4) as env, env.begin(write=True) as txn:
        payloads = env.open_db(b"payload", txn=txn)
        for block in {block for block, _ in damaged}:
            held = bytearray(txn.get(block.to_bytes(8, "big"), db=payloads))
            for row in (row for of, row in damaged if of == block):
                held[row * _WIDTH] ^= 1
            txn.put(block.to_bytes(8, "big"), bytes(held), db=payloads)
    store = DiskStore(tmp_path, 64 << 20)
    gather = Gather(store)

    @given(_STRETCHES, _COLUMNS)
    def holds(spans: list[tuple[int, int, int]], columns: tuple[slice, ...]) -> None:
        locations = _locations([(b, first, min(n, _ROWS - first)) for b, first, n in spans])
        valid, rows = [], []
        for location in locations:
            (intact,), row = _expected(blocks, np.array([location]), columns)
            intact = intact and tuple(location.tolist()) not in damaged
            valid.append(intact)
            rows += row if intact else []
        before = gather.corrupt_rows
        _check(gather, columns, locations, valid, rows)
        if columns:
            lost = sum(tuple(location) in damaged for location in locations.tolist())
            assert gather.corrupt_rows == before + lost

    holds()
    store.close()


def test_a_piece_is_bounded_however_much_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.daemon.fetch.gather.CHUNK_BYTES", 4096)
    store = MemoryStore(64 << 20)
    _filled(store)
    locations = _locations([(1, 0, _ROWS)] * 10_000)
    sizes = [rows.nbytes for _, _, rows in _read(Gather(store), (slice(0, _WIDTH),), locations)]
    assert max(sizes) <= 4096
    assert sum(sizes) == 10_000 * _ROWS * _WIDTH
