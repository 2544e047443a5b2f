"""Low-bit records: layout of the planes, and that nothing kept is lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.fp4.bit_planes import pack_planes, plane_bytes, unpack_planes

BITS = [1, 2, 3, 4]


def random_codes(*shape: int) -> torch.Tensor:
    return torch.randint(
        0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("element", [0, 1, 7, 8, 13, 15])
@pytest.mark.parametrize("bit", range(4))
def test_bit_j_of_element_i_is_bit_i_mod_8_of_byte_i_div_8_of_plane_j(
    bits: int, element: int, bit: int
) -> None:
    codes = torch.zeros(16, dtype=torch.uint8)
    codes[element] = 1 << bit
    expected = [0] * (2 * bits)
    if bit < bits:
        expected[2 * bit + element // 8] = 1 << element % 8
    assert pack_planes(codes, bits).tolist() == expected


@pytest.mark.parametrize("bits", BITS)
def test_the_kept_bits_of_every_code_word_come_back(bits: int) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2, 1)
    packed = pack_planes(codes, bits)
    assert packed.shape == (3, 2, plane_bytes(16, bits))
    assert torch.equal(unpack_planes(packed, bits, 16), codes & (1 << bits) - 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=4), st.sampled_from(BITS))
def test_any_bytes_are_a_record_that_packs_to_itself(chunks: list[bytes], bits: int) -> None:
    packed = torch.frombuffer(bytearray(b"".join(chunks)) * bits, dtype=torch.uint8)
    n = packed.numel() * 8 // bits
    assert torch.equal(pack_planes(unpack_planes(packed, bits, n), bits), packed)


def test_a_shorter_record_is_a_prefix_of_a_longer_one() -> None:
    codes = random_codes(5, 64)
    full = pack_planes(codes, 4)
    for bits in BITS:
        assert torch.equal(pack_planes(codes, bits), full[:, : plane_bytes(64, bits)])


def test_views_with_strides_pack_like_their_copies() -> None:
    codes = random_codes(64, 6, 3)[:, ::2].permute(2, 1, 0)
    assert torch.equal(pack_planes(codes, 3), pack_planes(codes.contiguous(), 3))
    packed = pack_planes(random_codes(4, 64), 4)[:, : plane_bytes(64, 2)]
    assert torch.equal(unpack_planes(packed, 2, 64), unpack_planes(packed.clone(), 2, 64))


def test_no_rows_make_no_bytes() -> None:
    packed = pack_planes(torch.zeros(0, 32, dtype=torch.uint8), 2)
    assert packed.shape == (0, 8)
    assert unpack_planes(packed, 2, 32).shape == (0, 32)


@pytest.mark.parametrize("bits", [0, 5, -1])
def test_other_numbers_of_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="1 to 4 bits"):
        pack_planes(random_codes(8), bits)
    with pytest.raises(ValueError, match="1 to 4 bits"):
        unpack_planes(random_codes(8), bits, 8)


def test_a_row_that_is_not_whole_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_planes(random_codes(12), 1)


def test_a_record_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 4 bytes, not 3"):
        unpack_planes(random_codes(3), 2, 16)
