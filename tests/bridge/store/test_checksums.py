"""A row's checksum says what its bytes are and where it stands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from bridge.store.checksums import row_checksums, row_is_intact

TWO_ROWS = b"abcdefgh12345678"


def test_the_library_computes_xxh3_as_it_is_published() -> None:
    """The 64-bit hash of no bytes with seed 0, from xxHash's own test vectors."""
    assert xxh3_64_intdigest(b"") == 0x2D06800538D394C2


@pytest.mark.parametrize(
    ("number", "sums"),
    [
        (0, [0x6F45A76842A96483, 0x31B6DAFCF19B7FEA]),
        (3, [0x17915E772E9379E5, 0xF21C94C4B2E159B2]),
        ((1 << 40) + 5, [0xCCEEC21B39451EBB, 0x5C922943B7AECA60]),
    ],
)
def test_known_sums_that_stores_on_disk_have(number: int, sums: list[int]) -> None:
    assert row_checksums(number, TWO_ROWS, 8).tolist() == sums


def test_the_seed_is_the_entry_above_twenty_bits_of_place() -> None:
    expected = [xxh3_64_intdigest(TWO_ROWS[at : at + 4], (9 << 20) + at // 4) for at in (0, 4, 8)]
    assert row_checksums(9, TWO_ROWS[:12], 4).tolist() == expected


def test_sums_are_little_endian_on_disk() -> None:
    found = row_checksums(3, TWO_ROWS, 8)
    assert found.dtype == np.dtype("<u8")
    assert found.tobytes()[:8] == bytes.fromhex("e579932e775e9117")


def test_a_payload_that_is_not_rows_has_one_sum() -> None:
    assert row_checksums(7, TWO_ROWS[:8], 0).tolist() == [0x2F10F4B77F13C68F]
    assert row_checksums(7, memoryview(TWO_ROWS[:8]), 8).tolist() == [0x2F10F4B77F13C68F]


@pytest.mark.parametrize("row_bytes", [0, 8])
def test_nothing_has_no_sum(row_bytes: int) -> None:
    assert row_checksums(7, b"", row_bytes).shape == (0,)


@given(
    number=st.integers(0, 1 << 40),
    rows=st.lists(st.binary(min_size=3, max_size=3), min_size=1, max_size=5),
)
def test_every_row_is_intact_at_its_own_place(number: int, rows: list[bytes]) -> None:
    for offset, expected in enumerate(row_checksums(number, b"".join(rows), 3).tolist()):
        found = row_is_intact(number, offset, rows[offset], expected)
        assert found is True


@pytest.mark.parametrize(("number", "offset"), [(6, 1), (5, 0), (5, 2), (4, 1)])
def test_an_intact_row_at_another_place_is_found_out(number: int, offset: int) -> None:
    expected = row_checksums(5, TWO_ROWS, 8).tolist()[1]
    assert row_is_intact(5, 1, TWO_ROWS[8:], expected)
    assert row_is_intact(number, offset, TWO_ROWS[8:], expected) is False


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_of_a_row_counts(bit: int) -> None:
    expected = row_checksums(5, TWO_ROWS, 8).tolist()[0]
    altered = bytearray(TWO_ROWS[:8])
    altered[bit // 8] ^= 1 << bit % 8
    assert not row_is_intact(5, 0, bytes(altered), expected)


def test_the_last_place_of_an_entry_is_not_the_first_of_the_next() -> None:
    """A message has at most 2^20 rows; the seeds of the next entry begin right behind them."""
    last = (1 << 20) - 1
    sums = {xxh3_64_intdigest(b"row", seed) for seed in ((5 << 20) + last, 6 << 20)}
    assert len(sums) == 2
    assert row_is_intact(5, last, b"row", xxh3_64_intdigest(b"row", (6 << 20) - 1))
