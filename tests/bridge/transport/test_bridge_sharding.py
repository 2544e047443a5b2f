"""Which bridge holds what: rollout and trainer must agree on it, in every release."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.transport.bridge_sharding import (
    MAX_BRIDGES,
    InvalidEndpoints,
    counts_of,
    parse_endpoints,
    row_number,
    shard_of,
    shards_of,
)


@pytest.mark.parametrize(
    ("name", "of_three", "of_sixty_four"),
    [("t", 2, 45), ("trajectory-7", 0, 60), ("é\ud800", 1, 12)],
)
def test_known_homes(name: str, of_three: int, of_sixty_four: int) -> None:
    assert [shard_of(name, bridges) for bridges in (1, 3, 64)] == [0, of_three, of_sixty_four]


def test_every_bridge_is_the_home_of_a_fair_share() -> None:
    shares = np.bincount([shard_of(f"t{number}", 8) for number in range(8000)], minlength=8)
    assert len(shares) == 8
    assert 850 < shares.min() <= shares.max() < 1150


def test_a_rows_number_has_the_home_above_48_bits_of_count() -> None:
    assert row_number(5, 3) == 0x3_0000_0000_0005
    assert row_number((1 << 48) - 1, 0) == 0xFFFF_FFFF_FFFF


@given(count=st.integers(0, (1 << 48) - 1), home=st.integers(0, MAX_BRIDGES - 1))
def test_home_and_count_come_back_from_a_rows_number(count: int, home: int) -> None:
    number = row_number(count, home)
    assert (shards_of(number), counts_of(number)) == (home, count)
    numbers = np.array([number, number])
    assert shards_of(numbers).tolist() == [home] * 2
    assert counts_of(numbers).tolist() == [count] * 2


def test_a_position_without_a_row_has_no_home() -> None:
    assert shards_of(-1) == -1
    assert shards_of(np.array([-1])).tolist() == [-1]


def test_endpoints_keep_their_order_without_the_blanks() -> None:
    assert parse_endpoints("tcp://b:1") == ("tcp://b:1",)
    assert parse_endpoints(" tcp://b:1, tcp://a:1 ") == ("tcp://b:1", "tcp://a:1")


def test_as_many_bridges_as_a_row_number_has_room_for() -> None:
    most = [f"tcp://h:{port}" for port in range(1, 65)]
    assert parse_endpoints(",".join(most)) == tuple(most)
    with pytest.raises(InvalidEndpoints, match="give 1 to 64 endpoints"):
        parse_endpoints(",".join([*most, "tcp://h:65"]))


@pytest.mark.parametrize("text", ["", " ", "tcp://a:1,", ",tcp://a:1", "tcp://a:1,,tcp://b:1"])
def test_an_empty_place_in_the_list_is_refused(text: str) -> None:
    sentence = (
        f"{text!r} names no bridges; give 1 to 64 endpoints such as tcp://HOST:7707, "
        "separated by commas"
    )
    with pytest.raises(InvalidEndpoints, match=f"^{re.escape(sentence)}$"):
        parse_endpoints(text)


def test_a_bridge_named_twice_is_refused() -> None:
    with pytest.raises(InvalidEndpoints, match="names a bridge twice; give every bridge once"):
        parse_endpoints("tcp://a:1, tcp://a:1")
