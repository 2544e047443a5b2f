"""A copy's checksum is that of the bytes that were copied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from bridge import summed_copy as module
from bridge.summed_copy import summed_copy


@given(source=st.binary(max_size=100), room=st.integers(0, 20), part=st.integers(1, 40))
def test_all_bytes_are_copied_and_summed(source: bytes, room: int, part: int) -> None:
    target = bytearray(len(source) + room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_BYTES", part)
        assert summed_copy(memoryview(target), memoryview(source)) == xxh3_64_intdigest(source)
    assert bytes(target) == source + bytes(room)


def test_a_target_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="memoryview assignment"):
        summed_copy(memoryview(bytearray(4)), memoryview(b"12345"))
