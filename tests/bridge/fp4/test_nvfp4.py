"""FP4 arithmetic against slow, obvious oracles, exhaustively where the input is small."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from bridge.fp4.nvfp4 import (
    E2M1_MAGNITUDES,
    E4M3_NAN,
    E8M0_NAN,
    MIN_POWER_SCALE,
    Fp4Tensor,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    has_nan_scale,
    pack_nibbles,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_weight,
    tensor_scale,
    token_scale,
    unpack_nibbles,
)

INF = math.inf
NAN = math.nan
ALL_CODES = torch.arange(16, dtype=torch.uint8)
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
MIDPOINTS = [(a + b) / 2 for a, b in pairwise(E2M1_MAGNITUDES)]
ONE = torch.tensor(1.0)


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare float32 tensors so that -0.0 differs from 0.0 and NaN equals NaN."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def nearest_even(value: float, grid: list[float]) -> int:
    """Index of the nearest grid value in exact arithmetic; a tie goes to the even index."""
    distances = [abs(value - g) for g in grid]
    nearest = [i for i, d in enumerate(distances) if d == min(distances)]
    return next((i for i in nearest if i % 2 == 0), nearest[0])


def e4m3_value(byte: int) -> float:
    """Decode E4M3 by its definition: bias 7, no infinity, S.1111.111 is NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


E4M3_GRID = [e4m3_value(byte) for byte in range(0x7F)]


class TestE2M1:
    def test_every_code_decodes_to_its_signed_magnitude(self) -> None:
        expected = f32(*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES))
        assert same_bits(decode_e2m1(ALL_CODES), expected)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_decoding_is_exact_in_half_precision(self, dtype: torch.dtype) -> None:
        decoded = decode_e2m1(ALL_CODES, dtype)
        assert decoded.dtype is dtype
        assert same_bits(decoded.to(torch.float32), decode_e2m1(ALL_CODES))

    def test_every_code_word_encodes_to_itself_negative_zero_included(self) -> None:
        assert torch.equal(encode_e2m1(decode_e2m1(ALL_CODES)), ALL_CODES)

    @pytest.mark.parametrize(("index", "midpoint"), list(enumerate(MIDPOINTS)))
    def test_a_tie_goes_to_the_even_code(self, index: int, midpoint: float) -> None:
        even = index + index % 2
        assert encode_e2m1(f32(midpoint, -midpoint)).tolist() == [even, even | 8]

    @pytest.mark.parametrize(("index", "midpoint"), list(enumerate(MIDPOINTS)))
    def test_one_ulp_beside_a_tie_goes_to_the_nearer_code(
        self, index: int, midpoint: float
    ) -> None:
        below = np.nextafter(np.float32(midpoint), np.float32(0))
        above = np.nextafter(np.float32(midpoint), np.float32(9))
        assert encode_e2m1(f32(below, above)).tolist() == [index, index + 1]
        assert encode_e2m1(f32(-below, -above)).tolist() == [index | 8, index + 1 | 8]

    def test_every_finite_bf16_number_rounds_as_the_oracle_says(self) -> None:
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        numbers = bits.view(torch.bfloat16).to(torch.float32)
        numbers = numbers[torch.isfinite(numbers)]
        codes = encode_e2m1(numbers).tolist()
        for number, code in zip(numbers.tolist(), codes, strict=True):
            sign = 8 if math.copysign(1, number) < 0 else 0
            clipped = min(abs(number), 6.0)
            assert code == nearest_even(clipped, list(E2M1_MAGNITUDES)) | sign, number

    def test_large_and_infinite_values_saturate_at_six(self) -> None:
        z = f32(6.0, 7.0, 1e30, INF, -7.0, -INF)
        assert encode_e2m1(z).tolist() == [7, 7, 7, 7, 15, 15]

    def test_nan_takes_the_largest_magnitude(self) -> None:
        assert encode_e2m1(f32(NAN)).item() & 7 == 7

    def test_the_sign_of_zero_and_of_values_rounded_to_zero_is_kept(self) -> None:
        assert encode_e2m1(f32(0.0, -0.0, 1e-45, -1e-45, 0.25, -0.25)).tolist() == [0, 8] * 3

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
    def test_other_dtypes_are_refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match="float32"):
            encode_e2m1(torch.zeros(8, dtype=dtype))


class TestNibbles:
    def test_the_low_nibble_is_the_even_index(self) -> None:
        assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[33, 15]]

    def test_every_byte_survives_unpacking_and_packing(self) -> None:
        assert torch.equal(pack_nibbles(unpack_nibbles(ALL_BYTES)), ALL_BYTES)
        assert unpack_nibbles(ALL_BYTES).max() == 15

    def test_an_odd_number_of_codes_is_refused(self) -> None:
        with pytest.raises(ValueError, match="even number"):
            pack_nibbles(torch.zeros(3, dtype=torch.uint8))


class TestE4M3:
    def test_every_bit_pattern_decodes_by_the_definition(self) -> None:
        decoded = decode_e4m3(ALL_BYTES).tolist()
        for byte, value in enumerate(decoded):
            expected = e4m3_value(byte)
            assert value == expected or (math.isnan(value) and math.isnan(expected)), byte
        assert math.copysign(1, decoded[0x80]) == -1

    def test_every_number_encodes_to_its_own_bits(self) -> None:
        numbers = ALL_BYTES[(ALL_BYTES & E4M3_NAN) != E4M3_NAN]
        assert torch.equal(encode_e4m3(decode_e4m3(numbers)), numbers)

    def test_every_midpoint_goes_to_even_bits_and_its_neighbours_to_the_nearer(self) -> None:
        for low in range(0x7E):
            midpoint = np.float32((E4M3_GRID[low] + E4M3_GRID[low + 1]) / 2)
            below, above = (np.nextafter(midpoint, np.float32(to)) for to in (0, 1e9))
            even = low + low % 2
            assert encode_e4m3(f32(below, midpoint, above)).tolist() == [low, even, low + 1]
            assert encode_e4m3(f32(-midpoint)).item() == even | 0x80

    def test_finite_values_above_448_saturate(self) -> None:
        x = f32(448.0, 448.1, 464.0, 480.0, 1e38, -449.0, -1e38)
        assert encode_e4m3(x).tolist() == [0x7E] * 5 + [0xFE] * 2

    def test_nan_and_infinities_become_the_nan_code(self) -> None:
        negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
        x = torch.cat((f32(NAN, INF, -INF), negative_nan))
        assert encode_e4m3(x).tolist() == [E4M3_NAN] * 4


class TestE8M0:
    def test_every_code_decodes_to_its_power_of_two(self) -> None:
        decoded = decode_e8m0(ALL_BYTES).tolist()
        assert decoded[:255] == [2.0 ** (code - 127) for code in range(255)]
        assert math.isnan(decoded[255])

    def test_every_power_of_two_encodes_to_its_code_and_more_to_the_next(self) -> None:
        powers = decode_e8m0(ALL_BYTES[:255])
        assert torch.equal(encode_e8m0(powers), ALL_BYTES[:255])
        above = torch.nextafter(powers, f32(INF))
        assert torch.equal(encode_e8m0(above)[:254], ALL_BYTES[1:255])

    def test_the_range_ends_saturate_and_non_finite_is_nan(self) -> None:
        x = f32(0.0, -0.0, -5.0, 1e-45, 3e38, NAN, INF, -INF)
        assert encode_e8m0(x).tolist() == [0, 0, 0, 0, 254, E8M0_NAN, E8M0_NAN, E8M0_NAN]


def nvfp4_oracle(block: np.ndarray, global_scale: np.float32) -> tuple[int, list[int]]:
    """Quantize one finite block of 16 float32 values element by element."""
    amax = np.float32(np.abs(block).max())
    wanted = min(float(amax / np.float32(6) / global_scale), 448.0)
    scale_u8 = nearest_even(wanted, E4M3_GRID)
    scale = np.float32(E4M3_GRID[scale_u8]) * global_scale
    if scale == 0:
        return scale_u8, [0] * 16
    codes = []
    for z in block / scale:
        sign = 8 if np.signbit(z) else 0
        codes.append(nearest_even(min(float(abs(z)), 6.0), list(E2M1_MAGNITUDES)) | sign)
    return scale_u8, codes


finite_f32 = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100
)
global_scales = st.one_of(
    st.integers(-20, 20).map(lambda k: 2.0**k), st.floats(2.0**-20, 2.0**20, width=32)
)


class TestNvfp4:
    @settings(max_examples=300, deadline=None)
    @given(st.lists(finite_f32, min_size=32, max_size=32), global_scales)
    def test_any_finite_blocks_match_the_oracle(
        self, values: list[float], global_scale: float
    ) -> None:
        x = np.array(values, dtype=np.float32)
        result = quantize_nvfp4(torch.from_numpy(x), torch.tensor(global_scale))
        for block in range(2):
            scale_u8, codes = nvfp4_oracle(x[16 * block :][:16], np.float32(global_scale))
            assert result.scales_u8[block].item() == scale_u8
            assert result.codes_u8[16 * block :][:16].tolist() == codes

    @pytest.mark.parametrize("mantissa", range(1, 8))
    def test_a_subnormal_block_scale_is_used(self, mantissa: int) -> None:
        block = torch.full((16,), 6 * mantissa * 2.0**-9)
        block[1] = -block[0] / 12
        result = quantize_nvfp4(block, ONE)
        assert result.scales_u8.tolist() == [mantissa]
        assert result.codes_u8[:3].tolist() == [7, 9, 7]

    def test_a_block_too_small_for_any_scale_becomes_positive_zero(self) -> None:
        result = quantize_nvfp4(torch.full((16,), -6 * 2.0**-10), ONE)
        assert result.scales_u8.tolist() == [0]
        assert same_bits(result.dequantize(), torch.zeros(16))
        assert quantize_nvfp4(torch.full((16,), -0.0), ONE).codes_u8.tolist() == [0] * 16

    def test_a_block_too_large_for_the_global_scale_saturates(self) -> None:
        result = quantize_nvfp4(torch.full((16,), -1e6), ONE)
        assert result.scales_u8.tolist() == [0x7E]
        assert torch.equal(result.dequantize(), torch.full((16,), -6 * 448.0))

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("position", [0, 7, 15])
    def test_non_finite_input_marks_its_block_and_no_other(self, bad: float, position: int) -> None:
        x = torch.linspace(-3, 3, 48).repeat(2, 1)
        expected = quantize_nvfp4(x, ONE)
        x[1, 16 + position] = bad
        result = quantize_nvfp4(x, ONE)
        assert result.scales_u8[1, 1] == E4M3_NAN
        assert result.codes_u8[1, 16:32].tolist() == [0] * 16
        assert result.dequantize()[1, 16:32].isnan().all()
        assert torch.equal(result.scales_u8[0], expected.scales_u8[0])
        assert torch.equal(result.codes_u8[1, 32:], expected.codes_u8[1, 32:])
        assert has_nan_scale(result.scales_u8)
        assert not has_nan_scale(expected.scales_u8)

    @pytest.mark.parametrize("bad", [NAN, INF, 0.0])
    def test_an_unusable_global_scale_dequantizes_to_nan(self, bad: float) -> None:
        result = quantize_nvfp4(torch.ones(16), torch.tensor(bad))
        assert result.dequantize().isnan().all()

    def test_a_scale_per_token_equals_each_token_on_its_own(self) -> None:
        x = (
            torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
            * f32(1, 9, 80, 1e3, 1e-4)[:, None]
        )
        together = quantize_nvfp4(x, token_scale(x))
        for row, alone_x in enumerate(x):
            alone = quantize_nvfp4(alone_x, tensor_scale(alone_x))
            assert torch.equal(together.codes_u8[row], alone.codes_u8)
            assert torch.equal(together.scales_u8[row], alone.scales_u8)
            assert torch.equal(together.dequantize()[row], alone.dequantize())

    def test_bf16_input_is_upcast_before_anything_else(self) -> None:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        scale = torch.tensor(0.0123)
        low, high = quantize_nvfp4(x, scale), quantize_nvfp4(x.to(torch.float32), scale)
        assert torch.equal(low.codes_u8, high.codes_u8)
        assert torch.equal(low.scales_u8, high.scales_u8)

    def test_leading_dimensions_and_no_rows_are_kept(self) -> None:
        result = quantize_nvfp4(torch.ones(2, 3, 32), ONE)
        assert result.codes_u8.shape == (2, 3, 32)
        assert result.scales_u8.shape == (2, 3, 2)
        empty = torch.zeros(0, 32)
        assert quantize_nvfp4(empty, token_scale(empty)).dequantize().shape == (0, 32)

    def test_the_input_is_left_alone(self) -> None:
        x = torch.full((16,), -1e-12)
        quantize_nvfp4(x, ONE)
        assert torch.equal(x, torch.full((16,), -1e-12))

    def test_a_row_that_is_not_whole_blocks_is_refused(self) -> None:
        with pytest.raises(ValueError, match="16"):
            quantize_nvfp4(torch.ones(24), ONE)

    def test_a_weight_has_one_power_of_two_scale(self) -> None:
        w = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        result = quantize_weight(w)
        assert result.global_scale.shape == ()
        assert math.frexp(result.global_scale.item())[0] == 0.5
        assert (result.dequantize() - w).abs().max() <= w.abs().max() / 6


class TestPowerOfTwoScales:
    @settings(max_examples=300, deadline=None)
    @given(st.floats(2.0**-80, 2.0**100, width=32))
    def test_it_is_the_smallest_power_of_two_that_keeps_block_scales_in_range(
        self, amax: float
    ) -> None:
        scale = token_scale(f32(0.0, -amax)).item()
        assert math.frexp(scale)[0] == 0.5
        assert amax <= 6 * 448 * scale
        assert amax > 6 * 448 * scale / 2

    @pytest.mark.parametrize("exponent", [-60, -11, 0, 3, 100])
    def test_an_amax_exactly_at_the_limit_and_one_ulp_beside(self, exponent: int) -> None:
        limit = np.float32(6 * 448 * 2.0**exponent)
        above = np.nextafter(limit, np.float32(INF))
        assert tensor_scale(f32(limit)).item() == 2.0**exponent
        assert tensor_scale(f32(above)).item() == 2.0 ** (exponent + 1)

    def test_zero_rows_tiny_rows_and_non_finite_rows(self) -> None:
        x = torch.tensor([[0.0, -0.0], [1e-45, 0.0], [NAN, 1.0], [1.0, -INF]])
        scale = token_scale(x)
        assert scale.shape == (4, 1)
        assert scale[:2, 0].tolist() == [1.0, MIN_POWER_SCALE]
        assert scale[2:].isnan().all()

    @pytest.mark.parametrize("exponent", [-116, -100, -20, -1, 0, 1, 20, 100])
    def test_code_times_scales_is_exact_in_bf16(self, exponent: int) -> None:
        codes = ALL_CODES.repeat(127, 1)
        scales = torch.arange(127, dtype=torch.uint8)[:, None]
        tensor = Fp4Tensor(codes, scales, torch.tensor(2.0**exponent), block=16)
        exact = tensor.dequantize(torch.float64)
        in_bf16 = tensor.dequantize(torch.bfloat16)
        unfolded = decode_e2m1(codes).double() * decode_e4m3(scales).double() * 2.0**exponent
        assert torch.equal(in_bf16.double(), unfolded)
        assert torch.equal(exact, unfolded)


class TestMxfp4:
    @pytest.mark.parametrize(
        ("amax", "scale"),
        [(6.0, 1.0), (6.0000005, 2.0), (3.0, 0.5), (4.0, 1.0), (1e-30, 2.0**-102)],
    )
    def test_the_scale_is_the_smallest_power_of_two_that_does_not_saturate(
        self, amax: float, scale: float
    ) -> None:
        x = torch.zeros(32)
        x[5] = -amax
        result = quantize_mxfp4(x)
        assert result.effective_scale().tolist() == [scale]
        assert result.codes_u8[5] == encode_e2m1(f32(-amax / scale)).item()

    def test_every_code_word_is_its_own_quantization(self) -> None:
        x = decode_e2m1(ALL_CODES.repeat(2)) * 2.0**-5
        result = quantize_mxfp4(x)
        assert torch.equal(result.codes_u8, ALL_CODES.repeat(2))
        assert same_bits(result.dequantize(), x)

    def test_zero_blocks_stay_zero(self) -> None:
        result = quantize_mxfp4(torch.zeros(64))
        assert result.scales_u8.tolist() == [0, 0]
        assert torch.equal(result.dequantize(), torch.zeros(64))

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_non_finite_input_marks_its_block_and_no_other(self, bad: float) -> None:
        x = torch.ones(3, 32)
        x[1, 9] = bad
        result = quantize_mxfp4(x)
        assert result.scales_u8[1].tolist() == [E8M0_NAN]
        assert result.codes_u8[1].tolist() == [0] * 32
        assert result.dequantize().isnan().any(dim=1).tolist() == [False, True, False]
        assert has_nan_scale(result.scales_u8, block=32)
        assert not has_nan_scale(quantize_mxfp4(torch.ones(32)).scales_u8, block=32)


def test_quantization_never_reads_a_value_on_the_host() -> None:
    """A fake tensor has no values: `.item()` or a data-dependent shape would raise."""
    with FakeTensorMode():
        x = torch.empty(4, 64, dtype=torch.bfloat16)
        assert quantize_nvfp4(x, token_scale(x)).dequantize().shape == (4, 64)
        assert quantize_weight(x).dequantize().shape == (4, 64)
        assert quantize_mxfp4(x).dequantize().shape == (4, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_gives_the_same_bits_as_the_cpu() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    x[3, 5], x[4, 6], x[5] = NAN, INF, 0.0
    for on_cpu, on_cuda in (
        (quantize_nvfp4(x, token_scale(x)), quantize_nvfp4(x.cuda(), token_scale(x.cuda()))),
        (quantize_mxfp4(x), quantize_mxfp4(x.cuda())),
    ):
        assert torch.equal(on_cpu.codes_u8, on_cuda.codes_u8.cpu())
        assert torch.equal(on_cpu.scales_u8, on_cuda.scales_u8.cpu())
        assert same_bits(on_cpu.dequantize().nan_to_num(), on_cuda.dequantize().cpu().nan_to_num())
