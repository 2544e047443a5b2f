"""What the decode kernel does not take is refused before anything is compiled."""

from __future__ import annotations

import pytest

from sglang_trace.attention.decode import check_shape


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 5, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 4, 8, 16])
def test_common_shapes_are_taken(head_dim: int, group: int, num_kv_heads: int) -> None:
    check_shape(group * num_kv_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((32, 4, 96), "head sizes"),
        ((32, 1, 128), "query heads a KV head"),
        ((30, 4, 128), "query heads a KV head"),
    ],
)
def test_other_shapes_are_refused_with_the_reason(shape: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_shape(*shape)
