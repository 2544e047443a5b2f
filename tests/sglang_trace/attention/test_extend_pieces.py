"""Prefill in pieces: every head of every request once, never more keys than the scratch holds."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_trace.attention import extend_pieces
from sglang_trace.attention.extend_pieces import LONG, SCRATCH_BYTES, Piece, pieces_of

SIZE = 64
# Of one key of one head, its value included.
BYTES = 2 * 2 * SIZE


def pieces(new: list[int], lengths: list[int], heads: int) -> list[Piece]:
    return pieces_of(new, lengths, heads=heads, size=SIZE, device="cpu")


request_of = st.tuples(st.integers(1, 300), st.integers(0, 2 * LONG))


@settings(deadline=None)
@given(
    requests=st.lists(request_of, min_size=1, max_size=12),
    heads=st.integers(1, 9),
    room=st.integers(1, 200_000),
)
def test_pieces_cover_a_pass_once_and_fit(
    requests: list[tuple[int, int]], heads: int, room: int
) -> None:
    new = [each for each, _prefix in requests]
    lengths = [each + prefix for each, prefix in requests]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extend_pieces, "SCRATCH_BYTES", room * BYTES)
        found = pieces(new, lengths, heads)
    covered = [
        (request, head)
        for piece in found
        for request in range(piece.requests.start, piece.requests.stop)
        for head in range(piece.heads.start, piece.heads.stop)
    ]
    assert sorted(covered) == list(itertools.product(range(len(new)), range(heads)))
    for piece in found:
        mine, count = piece.requests, piece.heads.stop - piece.heads.start
        one = mine.stop - mine.start == 1
        assert piece.keys * count <= room or (one and count == 1)
        assert one or max(lengths[mine]) < LONG, "a long request is alone"
        assert one or count == heads, "of several requests all heads"
        assert piece.tokens == slice(sum(new[: mine.start]), sum(new[: mine.stop]))
        assert piece.q_starts_S.tolist() == [0, *itertools.accumulate(new[mine])]
        assert piece.k_starts_S.tolist() == [0, *itertools.accumulate(lengths[mine])]
        assert piece.q_starts_S.dtype == piece.k_starts_S.dtype == torch.int32
        assert (piece.max_new, piece.max_keys) == (max(new[mine]), max(lengths[mine]))
        assert piece.keys == sum(lengths[mine])


def test_short_requests_are_one_piece_and_a_long_one_is_not_divided_without_need() -> None:
    (piece,) = pieces([5] * 100, [1000] * 100, heads=8)
    assert piece.requests == slice(0, 100)
    (piece,) = pieces([128], [131_200], heads=4)
    assert piece.heads == slice(0, 4)
    long = [piece.requests for piece in pieces([1] * 5, [10, 20, LONG, 30, 40], heads=1)]
    assert long == [slice(0, 2), slice(2, 3), slice(3, 5)]


def test_a_request_beyond_the_scratch_is_divided_by_heads_as_evenly_as_they_allow() -> None:
    room = SCRATCH_BYTES // BYTES
    found = pieces([16], [room // 3], heads=8)
    assert [piece.heads for piece in found] == [slice(0, 2), slice(2, 5), slice(5, 8)]
    assert len(pieces([16], [room + 1], heads=8)) == 8, "the least is one head"


def test_a_pass_of_nothing_has_no_pieces() -> None:
    assert pieces([], [], heads=4) == []
