"""FP4 code words, scales and records of a few numbers, derived by hand from the formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bridge import formats
from bridge.fp4 import bit_planes, nvfp4, scale_bits
from bridge.fp4.guided_rounding import (
    MatchRule,
    bracket_e2m1,
    fake_quantize,
    guided_codes,
    guided_fake_quantize,
    guided_quantize,
    reconstruct,
)
from bridge.fp4.nvfp4 import Fp4Tensor

INF, NAN = math.inf, math.nan
LEAST = 2.0**-149  # the smallest number of FP32 above zero
ONE = torch.tensor(1.0)


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def u8(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def hex_of(tensor: Tensor) -> str:
    return bytes(tensor.reshape(-1).tolist()).hex()


def test_the_constants_are_those_of_the_formats() -> None:
    assert nvfp4.E2M1_MAGNITUDES == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert (nvfp4.E2M1_MAX, nvfp4.E4M3_MAX, nvfp4.E4M3_NAN, nvfp4.E8M0_NAN) == (
        6.0,
        448.0,
        0x7F,
        0xFF,
    )
    assert (nvfp4.NVFP4_BLOCK, nvfp4.MXFP4_BLOCK, nvfp4.SIGN_BIT, nvfp4.MAGNITUDE_BITS) == (
        16,
        32,
        8,
        7,
    )
    assert (formats.NVFP4_BLOCK, formats.MAX_BITS, formats.SCALE_BITS) == (16, 4, (8, 2))
    assert (formats.FULL_SCALE_BITS, formats.LOW_SCALE_BITS) == (8, 2)
    assert [formats.plane_bytes(64, bits) for bits in (1, 2, 3, 4)] == [8, 16, 24, 32]
    assert [formats.scale_bytes(n, 8) for n in (16, 64, 80, 2048)] == [1, 4, 5, 128]
    assert [formats.scale_bytes(n, 2) for n in (16, 64, 80, 2048)] == [1, 1, 2, 32]


def test_the_least_token_scale_keeps_every_product_a_normal_number() -> None:
    """Smallest code word 2^-1, smallest E4M3 scale 2^-9, smallest normal number 2^-126."""
    assert nvfp4.MIN_POWER_SCALE == 2.0**-116
    least_product = nvfp4.MIN_POWER_SCALE * 2.0**-9 * 2.0**-1
    assert least_product == torch.finfo(torch.float32).tiny
    for amax in (LEAST, 2.0**-126, 2.0**-117, 2688 * 2.0**-116):
        assert nvfp4.tensor_scale(f32(amax)).item() == 2.0**-116
    assert nvfp4.tensor_scale(f32(2689 * 2.0**-116)).item() == 2.0**-115


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), "0001020304050607"),
        ((-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0), "08090a0b0c0d0e0f"),
        # Ties: to the even code word.
        ((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), "00020204040606"),
        ((-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0), "080a0a0c0c0e0e"),
        # The sign stays where the magnitude goes, and large magnitudes end at six.
        ((LEAST, -LEAST, 2.0**-126, -(2.0**-126)), "00080008"),
        ((6.1, -7.0, 3e38, -3e38, INF, -INF), "070f070f070f"),
    ],
)
def test_known_code_words(values: tuple[float, ...], codes: str) -> None:
    assert hex_of(nvfp4.encode_e2m1(f32(*values))) == codes


def test_nan_has_the_largest_magnitude_and_its_own_sign() -> None:
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert hex_of(nvfp4.encode_e2m1(torch.cat((f32(NAN), negative_nan)))) == "070f"
    assert nvfp4.clipped_magnitude(f32(NAN, -INF, -3.5, 6.5)).tolist() == [6.0, 6.0, 3.5, 6.0]


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"not torch\.bfloat16: convert first\.$"):
        nvfp4.encode_e2m1(torch.zeros(8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ((0.0, 2.0**-9, 2.0**-6, 1.0, 1.125, 448.0), "000108383" + "97e"),
        ((-0.0, -(2.0**-9), -1.0, -448.0), "8081b8fe"),
        # Ties: 2^-10 lies between 0 and 2^-9, 1.0625 between 1 and 1.125, 432 between 416 and 448.
        ((2.0**-10, 3 * 2.0**-10, 1.0625, 1.1875, 432.0), "00023" + "83a7e"),
        ((449.0, 464.0, 1e30, -1e30), "7e7e7efe"),
        ((NAN, INF, -INF), "7f7f7f"),
        ((LEAST, -LEAST), "0080"),
    ],
)
def test_known_block_scales(values: tuple[float, ...], bits: str) -> None:
    assert hex_of(nvfp4.encode_e4m3(f32(*values))) == bits


def test_known_values_of_block_scales() -> None:
    values = nvfp4.decode_e4m3(u8(0x00, 0x01, 0x07, 0x08, 0x38, 0x3F, 0x7E, 0xB8))
    assert values.tolist() == [0.0, 2.0**-9, 7 * 2.0**-9, 2.0**-6, 1.0, 1.875, 448.0, -1.0]
    assert values.dtype is torch.float32
    assert nvfp4.decode_e4m3(u8(0x7F, 0xFF)).isnan().all()


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ((1.0, 1.0 + 2.0**-23, 1.5, 2.0, 2.0**-126, 2.0**-127), "7f8080800100"),
        ((0.0, -0.0, -1.0, LEAST, 2.0**-127 + LEAST), "0000000001"),
        ((2.0**127, 1.5 * 2.0**127, 3.4e38), "fefefe"),
        ((NAN, INF, -INF), "ffffff"),
    ],
)
def test_known_powers_of_two(values: tuple[float, ...], codes: str) -> None:
    assert hex_of(nvfp4.encode_e8m0(f32(*values))) == codes


# Sixteen values whose largest, 12, is 6 * 2: block scale 2 at a global scale of 1. On the scale of
# code words they are 0, .5, ..., 6 and below them a tie, a rounded, a tiny and a saturating value.
BLOCK = f32(0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2.5, -5.0, 0.5, 1.3, -1e-9, -12)
CODES = "0001020304050607" + "08090a0c" + "0001080f"
VALUES = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -4, 0, 1, 0, -12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_known_nvfp4_block(dtype: torch.dtype) -> None:
    found = nvfp4.quantize_nvfp4(BLOCK.to(dtype), ONE)
    assert hex_of(found.codes_u8) == CODES
    assert hex_of(found.scales_u8) == "40"
    assert found.block == 16
    assert found.global_scale is ONE
    assert found.effective_scale().tolist() == [2.0]
    assert found.dequantize().tolist() == VALUES
    assert found.dequantize().dtype is torch.float32
    assert found.dequantize(torch.bfloat16).dtype is torch.bfloat16


def test_known_blocks_at_a_scale_a_token() -> None:
    """The second row is 2^-3 of the first, the global scale takes that up: equal code words."""
    x = torch.stack((BLOCK, BLOCK / 8)).repeat(1, 2)
    x[:, 16:] /= 4
    found = nvfp4.quantize_nvfp4(x, torch.tensor([[1.0], [0.125]]))
    assert hex_of(found.scales_u8) == "40304030"
    assert hex_of(found.codes_u8[0]) == hex_of(found.codes_u8[1]) == CODES + CODES
    assert found.effective_scale().tolist() == [[2.0, 0.5], [0.25, 0.0625]]
    unrounded = nvfp4.block_scales(x * 1.25, torch.tensor([[1.0], [0.125]]))
    assert unrounded.tolist() == [[2.5, 0.625]] * 2


def test_the_nearest_larger_power_of_two_is_a_weights_scale() -> None:
    """12 / 2688 lies between 2^-8 and 2^-7; the block scale is 12 / 6 / 2^-7."""
    found = nvfp4.quantize_weight(BLOCK[None])
    assert found.global_scale.shape == ()
    assert found.global_scale.item() == 2.0**-7
    assert hex_of(found.scales_u8) == "78"  # 256
    assert hex_of(found.codes_u8) == CODES


def test_a_known_mxfp4_block() -> None:
    """12 / 6 is a power of two; 12.5 / 6 is a little more, so the scale doubles."""
    x = torch.cat((BLOCK, BLOCK))
    found = nvfp4.quantize_mxfp4(x)
    assert hex_of(found.scales_u8) == "80"
    assert hex_of(found.codes_u8) == CODES + CODES
    assert found.dequantize().tolist() == VALUES + VALUES
    assert (found.block, found.global_scale.item(), found.global_scale.shape) == (32, 1.0, ())
    assert found.global_scale.dtype is torch.float32
    x[3] = 12.5
    assert hex_of(nvfp4.quantize_mxfp4(x).scales_u8) == "81"


@pytest.mark.parametrize(("quantize", "block"), [("quantize_nvfp4", 16), ("quantize_mxfp4", 32)])
def test_a_row_that_is_not_whole_blocks_is_refused(quantize: str, block: int) -> None:
    arguments = (ONE,) if block == 16 else ()
    with pytest.raises(
        ValueError, match=rf"^Blocks of {block} do not divide a last dimension of 40\.$"
    ):
        getattr(nvfp4, quantize)(torch.ones(2, 40), *arguments)


@pytest.mark.parametrize(
    ("scales", "block", "found"),
    [
        ((0x00, 0x7E, 0xFE), 16, False),
        ((0x00, 0x7F), 16, True),
        ((0xFF,), 16, True),
        ((0x7F, 0xFE), 32, False),
        ((0x7F, 0xFF), 32, True),
        ((), 16, False),
    ],
)
def test_known_marks_of_non_finite_blocks(scales: tuple[int, ...], block: int, found: bool) -> None:
    assert nvfp4.has_nan_scale(u8(*scales), block) is found
    assert nvfp4.has_nan_scale(u8(0x7F)) is True
    assert nvfp4.has_nan_scale(u8(0x7E)) is False


def test_blocks_that_carry_no_number_are_positive_zero() -> None:
    blocks = torch.full((4, 1, 16), -1.0)
    blocks[2] = NAN
    scaled = nvfp4.scaled_blocks(blocks, torch.tensor([[0.0], [NAN], [NAN], [0.5]]))
    assert scaled[:3].view(torch.int32).eq(0).all()
    assert scaled[3].eq(-2.0).all()
    assert hex_of(nvfp4.encode_blocks(blocks, torch.zeros(4, 1))) == "00" * 64


def test_scaling_keeps_every_bit_and_hides_a_nan_with_all_of_its_bits() -> None:
    odd = torch.full((2, 1, 16), 2.5).view(torch.int32) + 1  # one bit above a tie
    blocks = odd.view(torch.float32)
    assert torch.equal(nvfp4.scaled_blocks(blocks, torch.ones(2, 1)).view(torch.int32), odd)
    assert hex_of(nvfp4.encode_blocks(blocks, torch.ones(2, 1))) == "05" * 32
    payload = torch.full((1, 1, 16), 0x7FC00001, dtype=torch.int32).view(torch.float32)
    for scale in (0.0, NAN, 1.0 - 1.0):
        found = nvfp4.scaled_blocks(payload, torch.full((1, 1), scale))
        assert found.view(torch.int32).eq(0).all()


def test_nibbles_are_refused_by_the_number_of_code_words() -> None:
    assert hex_of(nvfp4.pack_nibbles(u8(*range(16)))) == "1032547698badcfe"
    assert nvfp4.unpack_nibbles(u8(0x21, 0xF0)).tolist() == [1, 2, 0, 15]
    with pytest.raises(ValueError, match=r"^Packing needs an even number of code words, not 3\.$"):
        nvfp4.pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))


def test_a_scale_is_the_mark_of_its_block_size() -> None:
    """0x40 is 2 in E4M3 and 2^-63 in E8M0."""
    nvfp4 = Fp4Tensor(u8(*[2] * 16), u8(0x40), ONE, 16)
    mxfp4 = Fp4Tensor(u8(*[2] * 32), u8(0x40), ONE, 32)
    assert nvfp4.dequantize().tolist() == [2.0] * 16
    assert mxfp4.dequantize().tolist() == [2.0**-63] * 32


class TestRecords:
    def test_known_planes(self) -> None:
        codes = u8(*range(8), *range(15, 7, -1))
        planes = ("aa55", "cc33", "f00f", "00ff")
        for bits in (1, 2, 3, 4):
            packed = bit_planes.pack_planes(codes, bits)
            assert hex_of(packed) == "".join(planes[:bits])
            low = codes & (1 << bits) - 1
            assert bit_planes.unpack_planes(packed, bits, 16).tolist() == low.tolist()

    def test_known_low_scales(self) -> None:
        scales = u8(0x38, 0x39, 0x3A, 0x3B, 0x7E, 0x01)
        packed = scale_bits.pack_low_scales(scales)
        assert hex_of(packed) == "e4" + "06"
        assert scale_bits.unpack_low_scales(packed, 6).tolist() == [0, 1, 2, 3, 2, 1]

    def test_known_readings_of_low_scales(self) -> None:
        """The trainer's own scale is 1.0, code 0x38; 0x36 and 0x3a are equally near to it."""
        own = f32(1.0, 1.0, 1.0, 1.0, 0.999)
        found = scale_bits.read_low_scales(u8(0, 1, 2, 3, 2), own)
        assert hex_of(found.codes_u8) == "38393a3736"
        assert found.ambiguous.tolist() == [False, False, True, False, True]

    def test_known_readings_at_the_ends_of_the_code_line(self) -> None:
        """Below 0x00 and above 0x7e there is no code: the only candidate is on the other side."""
        found = scale_bits.read_low_scales(u8(0, 1, 2, 3), torch.zeros(4))
        assert hex_of(found.codes_u8) == "00010203"
        assert found.ambiguous.tolist() == [False, False, True, True]
        found = scale_bits.read_low_scales(u8(2, 1, 0, 3), torch.full((4,), 448.0))
        assert hex_of(found.codes_u8) == "7e7d7c7b"
        assert found.ambiguous.tolist() == [False, False, True, True]

    def test_records_of_a_wrong_length_are_refused_with_the_right_one(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"^9 scales of 2 bits take 3 bytes, not 2: pass the number of blocks that was",
        ):
            scale_bits.unpack_low_scales(u8(0, 0), 9)
        with pytest.raises(
            ValueError, match=r"^A record of 2 bit\(s\) of 16 code words takes 4 bytes, not 3: pass"
        ):
            bit_planes.unpack_planes(u8(0, 0, 0), 2, 16)
        with pytest.raises(ValueError, match=r"^Bit planes need a multiple of 8 code words .* 12"):
            bit_planes.pack_planes(torch.zeros(12, dtype=torch.uint8), 1)
        with pytest.raises(ValueError, match=r"^A record keeps 1 to 4 bits of a code word, not 5"):
            bit_planes.pack_planes(torch.zeros(8, dtype=torch.uint8), 5)


PARITY, NEAREST = MatchRule.PARITY, MatchRule.NEAREST


class TestGuidance:
    def test_the_readings_have_their_names(self) -> None:
        assert [str(rule) for rule in MatchRule] == ["parity", "nearest"]

    def test_known_brackets(self) -> None:
        z = f32(0, 0.1, -0.5, 0.6, 2.1, -3.9, 5.9, 6.0, -99.0, -0.0)
        lower, upper = bracket_e2m1(z)
        assert hex_of(lower) == "00000101040506070700"
        assert hex_of(upper) == "00010102050607070700"

    @pytest.mark.parametrize(
        ("bits", "rule", "record", "z", "codes"),
        [
            # 1 bit: the bracket end of that parity.
            (1, PARITY, (0, 1, 0, 1), (1.1, 1.1, -1.1, -1.1), "02030a0b"),
            (1, PARITY, (0, 1, 1, 0), (2.1, 2.1, 4.4, 4.4), "04050706"),
            # Read by value, bit 1 below 2.25 is 1.5 and below 4.5 is 3: below the bracket.
            (1, NEAREST, (1, 1, 1, 1), (2.1, 2.25, 4.4, 4.5), "04050607"),
            # 2 bits: index 1 or 5 for record 1; the nearest to z decides, then the bracket.
            (2, PARITY, (1, 1, 1, 1), (0.1, 1.2, 1.9, 5.0), "01020406"),
            (2, PARITY, (0, 2, 3, 0), (1.2, 1.2, 1.2, 6.0), "03020307"),
            # 3 bits: the magnitude, brought to the bracket.
            (3, PARITY, (0, 7, 3, 2), (1.2, 1.2, -1.2, -1.2), "02030b0a"),
            # 4 bits: another sign lies beyond zero.
            (4, PARITY, (3, 11, 10, 15), (1.2, 1.2, -1.2, 5.0), "03020a06"),
            (4, PARITY, (0, 8, 7, 15), (0.0, -0.0, -0.3, 0.3), "00080800"),
        ],
    )
    def test_known_code_words(
        self, bits: int, rule: MatchRule, record: tuple[int, ...], z: tuple[float, ...], codes: str
    ) -> None:
        assert hex_of(guided_codes(f32(*z), u8(*record), bits, rule)) == codes
        if rule is PARITY:
            assert hex_of(guided_codes(f32(*z), u8(*record), bits)) == codes

    @pytest.mark.parametrize(
        ("bits", "rule", "record", "z", "values"),
        [
            (1, PARITY, (1, 0), (2.1, -2.1), [3.0, -2.0]),
            (1, NEAREST, (1, 0), (2.1, -2.1), [1.5, -2.0]),
            (2, PARITY, (0, 0), (0.9, 5.0), [0.0, 2.0]),
            (2, NEAREST, (3, 3), (3.7, 3.8), [1.5, 6.0]),
            (3, PARITY, (7, 1), (-0.1, 6.0), [-6.0, 0.5]),
            (4, PARITY, (15, 8), (1.0, 1.0), [-6.0, -0.0]),
        ],
    )
    def test_known_values_that_records_stand_for(
        self,
        bits: int,
        rule: MatchRule,
        record: tuple[int, ...],
        z: tuple[float, ...],
        values: list[float],
    ) -> None:
        assert reconstruct(u8(*record), f32(*z), bits, rule).tolist() == values
        if rule is PARITY:
            assert reconstruct(u8(*record), f32(*z), bits).tolist() == values

    def test_a_known_block_at_the_rollouts_scale(self) -> None:
        """At scale 2 the values are 0.55, 1.1 and so on; odd records take the odd end."""
        x = torch.zeros(2, 32)
        x[:, :4], x[:, 16:20] = f32(1.1, 2.2, -4.2, 30.0), f32(1.1, 2.2, -4.2, 30.0)
        record = torch.ones(2, 32, dtype=torch.uint8)
        scale = torch.tensor([[2.0, 1.0], [4.0, 0.0]])
        codes = guided_quantize(x, scale, record, 1)
        assert hex_of(codes[0, :4]) == "01030d07"
        assert hex_of(codes[0, 16:20]) == "03050f07"
        assert hex_of(codes[1, :4]) == "01010b07"
        assert hex_of(codes[1, 16:]) == "00" * 16
        values = guided_fake_quantize(x, scale, record, 1)
        assert values[0, :4].tolist() == [1.0, 3.0, -6.0, 12.0]
        assert values[0, 16:20].tolist() == [1.5, 3.0, -6.0, 6.0]

    @pytest.mark.parametrize("function", [guided_quantize, guided_fake_quantize])
    def test_the_reading_is_passed_on_and_is_parity_unless_said(self, function: object) -> None:
        x, record = torch.full((16,), 2.1), torch.ones(16, dtype=torch.uint8)
        by_value = function(x, torch.ones(1), record, 1, NEAREST)  # type: ignore[operator]
        by_parity = function(x, torch.ones(1), record, 1)  # type: ignore[operator]
        assert by_value.unique().item() in (2.0, 4)  # the value 2 is code word 4
        assert by_parity.unique().item() in (3.0, 5)

    def test_rounding_to_nearest_is_what_the_format_says(self) -> None:
        assert fake_quantize(BLOCK, ONE).tolist() == VALUES
        assert fake_quantize(BLOCK.bfloat16(), ONE).dtype is torch.bfloat16

    @pytest.mark.parametrize("bits", [0, 5])
    def test_other_numbers_of_bits_are_refused_in_a_sentence(self, bits: int) -> None:
        with pytest.raises(
            ValueError, match=rf"^A record keeps 1 to 4 bits of a code word, not {bits}\.$"
        ):
            guided_codes(f32(1.0), u8(1), bits)


class TestTypesAndPlaces:
    """Tensors without memory say where results would be, and refuse to mix devices."""

    def test_code_words_scales_and_records_are_bytes(self) -> None:
        x = torch.ones(2, 32)
        for tensor in (nvfp4.quantize_nvfp4(x, ONE), nvfp4.quantize_mxfp4(x)):
            assert tensor.codes_u8.dtype is tensor.scales_u8.dtype is torch.uint8
            assert tensor.global_scale.dtype is tensor.effective_scale().dtype is torch.float32
        codes = nvfp4.encode_e2m1(x)
        record = bit_planes.pack_planes(codes, 2)
        scales = scale_bits.pack_low_scales(codes)
        for found in (
            codes,
            nvfp4.sign_bits(x),
            nvfp4.pack_nibbles(codes),
            nvfp4.unpack_nibbles(codes),
            nvfp4.encode_e4m3(x),
            nvfp4.encode_e8m0(x),
            record,
            bit_planes.unpack_planes(record, 2, 32),
            scales,
            scale_bits.unpack_low_scales(scales, 32),
            scale_bits.read_low_scales(codes & 3, x).codes_u8,
            guided_codes(x, codes, 4),
            *bracket_e2m1(x),
        ):
            assert found.dtype is torch.uint8
        assert scale_bits.read_low_scales(codes & 3, x).ambiguous.dtype is torch.bool
        assert nvfp4.token_scale(x.bfloat16()).dtype is torch.float32
        assert nvfp4.tensor_scale(x.bfloat16()).dtype is torch.float32
        assert nvfp4.decode_e8m0(codes).dtype is reconstruct(codes, x, 4).dtype is torch.float32

    def test_everything_stays_on_its_device(self) -> None:
        x = torch.empty(2, 64, device="meta")
        nv, mx = nvfp4.quantize_nvfp4(x, nvfp4.token_scale(x)), nvfp4.quantize_mxfp4(x)
        record = bit_planes.pack_planes(nv.codes_u8, 2)
        low = bit_planes.unpack_planes(record, 2, 64)
        scales = scale_bits.pack_low_scales(nv.scales_u8)
        low_scale = scale_bits.unpack_low_scales(scales, 4)
        own = nvfp4.block_scales(x, nv.global_scale)
        for found in (
            *(nv.dequantize(), mx.dequantize(), mx.global_scale),
            *(nvfp4.quantize_weight(x).global_scale, record, low, scales, low_scale),
            scale_bits.read_low_scales(low_scale, own).codes_u8,
            *(guided_codes(x, low, bits) for bits in (1, 2, 3, 4)),
            guided_codes(x, low, 1, NEAREST),
            guided_fake_quantize(x, nv.effective_scale(), low, 2),
            fake_quantize(x, nv.global_scale),
        ):
            assert found.device.type == "meta"
