"""Block scales of 2 bits: how they are packed, and when the trainer reads the rollout's code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.formats import scale_bytes
from bridge.fp4.nvfp4 import block_scales, decode_e4m3, encode_e4m3, quantize_nvfp4, token_scale
from bridge.fp4.scale_bits import pack_low_scales, read_low_scales, unpack_low_scales

LARGEST = 0x7E
CODES = torch.arange(LARGEST + 1, dtype=torch.uint8)
codes = st.integers(0, LARGEST)


def read(rollout: int, own: int) -> tuple[int, bool]:
    """Read one code of the rollout beside the trainer's, whose scale is exactly that code's."""
    found = read_low_scales(torch.tensor([rollout & 3], dtype=torch.uint8), value_of(own))
    return int(found.codes_u8), bool(found.ambiguous)


def value_of(code: int) -> torch.Tensor:
    return decode_e4m3(torch.tensor([code], dtype=torch.uint8))


class TestPacking:
    def test_scale_i_is_in_byte_i_div_4_at_bits_2_i_mod_4(self) -> None:
        for i in range(9):
            scales = torch.zeros(9, dtype=torch.uint8)
            scales[i] = 0b11
            expected = [0, 0, 0]
            expected[i // 4] = 0b11 << 2 * (i % 4)
            assert pack_low_scales(scales).tolist() == expected

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 255), max_size=20), st.integers(0, 3))
    def test_the_low_bits_of_every_scale_come_back(self, scales: list[int], rows: int) -> None:
        every = torch.tensor(scales, dtype=torch.uint8).expand(rows, 2, len(scales))
        packed = pack_low_scales(every)
        assert packed.shape == (rows, 2, scale_bytes(16 * len(scales), 2))
        assert torch.equal(unpack_low_scales(packed, len(scales)), every & 3)

    @pytest.mark.parametrize("blocks", [4, 9])
    def test_a_record_of_another_length_is_refused(self, blocks: int) -> None:
        with pytest.raises(ValueError, match="bytes, not 2"):
            unpack_low_scales(torch.zeros(3, 2, dtype=torch.uint8), blocks)


class TestReading:
    @given(own=codes, step=st.sampled_from((-1, 0, 1)))
    def test_a_code_at_most_one_from_the_trainers_is_read_exactly(
        self, own: int, step: int
    ) -> None:
        rollout = min(max(own + step, 0), LARGEST)
        assert read(rollout, own) == (rollout, False)

    @given(own=codes, step=st.sampled_from((-2, 2)))
    def test_a_code_two_away_is_counted_as_ambiguous(self, own: int, step: int) -> None:
        rollout = own + step
        if 0 <= rollout <= LARGEST:
            found, ambiguous = read(rollout, own)
            assert ambiguous
            assert found in (own - 2, own + 2)

    @given(own=st.integers(3, LARGEST - 3), step=st.sampled_from((-3, 3)))
    def test_a_code_three_away_is_read_wrong_and_nothing_shows_it(
        self, own: int, step: int
    ) -> None:
        found, ambiguous = read(own + step, own)
        assert not ambiguous
        assert abs(found - own) == 1

    @given(
        scale=st.floats(0, 500, width=32),
        low=st.integers(0, 3),
    )
    def test_the_code_read_is_the_nearest_with_these_bits(self, scale: float, low: int) -> None:
        own = torch.tensor([scale])
        found = read_low_scales(torch.tensor([low], dtype=torch.uint8), own)
        code = int(encode_e4m3(own))
        distances = (CODES[low::4].to(torch.int16) - code).abs()
        assert int(found.codes_u8) & 3 == low
        assert abs(int(found.codes_u8) - code) == int(distances.min())
        assert bool(found.ambiguous) == (int(distances.min()) >= 2)

    @pytest.mark.parametrize(("toward", "expected"), [(-1, 38), (0, 42), (1, 42)])
    def test_of_two_equally_near_codes_the_one_on_the_unrounded_scales_side_is_taken(
        self, toward: int, expected: int
    ) -> None:
        own = value_of(40)
        own += toward * (value_of(41) - value_of(40)) / 4
        found = read_low_scales(torch.tensor([42 & 3], dtype=torch.uint8), own)
        assert found.codes_u8.tolist() == [expected]
        assert found.ambiguous.tolist() == [True]

    @pytest.mark.parametrize(
        ("own", "low", "expected"), [(0, 2, 2), (0, 3, 3), (1, 3, 3), (LARGEST, 0, 0x7C)]
    )
    def test_at_the_ends_of_the_code_line_the_only_candidate_is_taken(
        self, own: int, low: int, expected: int
    ) -> None:
        assert read(low, own) == (expected, True)

    @pytest.mark.parametrize("own", [448.0, 449.0, 1e30, torch.inf, torch.nan])
    @pytest.mark.parametrize("low", range(4))
    def test_no_scale_is_read_as_nan(self, own: float, low: int) -> None:
        found = read_low_scales(torch.tensor([low], dtype=torch.uint8), torch.tensor([own]))
        assert 0x7B <= int(found.codes_u8) <= LARGEST


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20), noise=st.floats(0, 0.02))
def test_a_trainer_two_percent_off_reads_every_scale(seed: int, noise: float) -> None:
    """A step of the code is at least 1/15 of a normal scale, so one step or none lies between."""
    generator = torch.Generator().manual_seed(seed)
    rollout = torch.randn(4, 256, generator=generator)
    own = rollout * (1 + noise * (2 * torch.rand(4, 256, generator=generator) - 1))
    fp4 = quantize_nvfp4(rollout, token_scale(rollout))
    low = unpack_low_scales(pack_low_scales(fp4.scales_u8), 16)
    found = read_low_scales(low, block_scales(own, fp4.global_scale))
    assert torch.equal(found.codes_u8, fp4.scales_u8)
    assert not found.ambiguous.any()


def test_the_trainers_scale_before_rounding_is_the_one_that_the_quantizer_rounds() -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = token_scale(x)
    unrounded = block_scales(x, scale)
    assert unrounded.dtype == torch.float32
    assert torch.equal(encode_e4m3(unrounded), quantize_nvfp4(x, scale).scales_u8)
