"""Guided rounding against brute force over candidate code words."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from bridge.fp4.bit_planes import pack_planes, unpack_planes
from bridge.fp4.guided_rounding import (
    MatchRule,
    bracket_e2m1,
    fake_quantize,
    guided_codes,
    guided_fake_quantize,
    guided_quantize,
    reconstruct,
    straight_through,
)
from bridge.fp4.nvfp4 import (
    E2M1_MAGNITUDES,
    decode_e2m1,
    encode_e2m1,
    quantize_nvfp4,
    token_scale,
)

PARITY, NEAREST = MatchRule.PARITY, MatchRule.NEAREST
ALL_CODES = torch.arange(16, dtype=torch.uint8)
# A grid of z that holds every code word, every midpoint, 2.25 and 4.5, and points between them.
STEP = 1 / 64
Z = torch.arange(-7 * 64, 7 * 64 + 1) * STEP
Z_BY_CODE, CODE_BY_Z = Z.repeat_interleave(16), ALL_CODES.repeat(len(Z))
ANY_Z = st.floats(-8, 8, width=32) | st.sampled_from(Z.tolist())


def low_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes & (1 << bits) - 1


def line_position(a: float) -> float:
    """Where a magnitude lies on the code line, a fractional index: linear between code words."""
    for index in range(7):
        low, high = E2M1_MAGNITUDES[index : index + 2]
        if a <= high:
            return index + (a - low) / (high - low)
    return 7.0


def bracket_oracle(z: float) -> tuple[int, int]:
    position = line_position(min(abs(z), 6.0))
    return math.floor(position), math.ceil(position)


def reconstruct_oracle(z: float, low: int, bits: int, rule: MatchRule) -> set[float]:
    """Values the record may stand for: all of those that tie."""
    sign = math.copysign(1, z)
    a = min(abs(z), 6.0)
    if bits == 4:
        return {decode_e2m1(torch.tensor(low, dtype=torch.uint8)).item()}
    matches = [i for i in range(8) if i & (1 << bits) - 1 == low]
    if rule is PARITY:
        distance = {i: abs(i - line_position(a)) for i in matches}
    else:
        distance = {i: abs(E2M1_MAGNITUDES[i] - a) for i in matches}
    least = min(distance.values())
    return {sign * E2M1_MAGNITUDES[i] for i in matches if distance[i] == least}


def guided_oracle(z: float, low: int, bits: int, rule: MatchRule) -> set[float]:
    """Values guided rounding may take: the bracket ends nearest to what the record stands for."""
    sign = math.copysign(1, z)
    ends = [sign * E2M1_MAGNITUDES[i] for i in bracket_oracle(z)]
    recorded = reconstruct_oracle(z, low, bits, rule)
    return {min(ends, key=lambda end: abs(end - r)) for r in recorded}


class TestBracket:
    def test_it_holds_z_between_neighbouring_code_words(self) -> None:
        lower, upper = bracket_e2m1(Z)
        for z, low, high in zip(Z.tolist(), lower.tolist(), upper.tolist(), strict=True):
            assert (low, high) == bracket_oracle(z), z

    def test_a_code_word_is_both_ends_of_its_own_bracket(self) -> None:
        lower, upper = bracket_e2m1(decode_e2m1(ALL_CODES))
        assert torch.equal(lower, ALL_CODES & 7)
        assert torch.equal(upper, ALL_CODES & 7)

    def test_one_ulp_off_a_code_word_opens_the_bracket(self) -> None:
        words = decode_e2m1(ALL_CODES[1:7])
        above = bracket_e2m1(torch.nextafter(words, torch.tensor(9.0)))
        below = bracket_e2m1(torch.nextafter(words, torch.tensor(0.0)))
        assert [t.tolist() for t in above] == [[1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]]
        assert [t.tolist() for t in below] == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]


class TestReadings:
    @pytest.mark.parametrize("rule", MatchRule)
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    def test_every_record_on_the_grid_agrees_with_brute_force(
        self, bits: int, rule: MatchRule
    ) -> None:
        low = low_bits(CODE_BY_Z, bits)
        guided = decode_e2m1(guided_codes(Z_BY_CODE, low, bits, rule))
        q_hat = reconstruct(low, Z_BY_CODE, bits, rule)
        records = [t.tolist() for t in (Z_BY_CODE, low, q_hat, guided)]
        for z, record, recorded, value in zip(*records, strict=True):
            assert recorded in reconstruct_oracle(z, record, bits, rule), (z, record)
            assert value in guided_oracle(z, record, bits, rule), (z, record)

    def test_with_one_bit_they_differ_exactly_where_the_step_doubles(self) -> None:
        low = low_bits(CODE_BY_Z, 1)
        differ = guided_codes(Z_BY_CODE, low, 1, PARITY) != guided_codes(Z_BY_CODE, low, 1, NEAREST)
        a = Z_BY_CODE.abs()
        step_doubles = ((a > 2) & (a < 2.25)) | ((a > 4) & (a < 4.5))
        assert torch.equal(differ, step_doubles & (low == 1))

    @pytest.mark.parametrize("bound", [2.0, 2.25, 4.0, 4.5])
    def test_the_bounds_of_that_set_are_sharp_to_one_ulp(self, bound: float) -> None:
        at = torch.tensor([bound])
        inside_is_above = bound in (2.0, 4.0)
        inside = torch.nextafter(at, torch.tensor(9.0 if inside_is_above else 0.0))
        outside = torch.nextafter(at, torch.tensor(0.0 if inside_is_above else 9.0))
        odd = torch.ones(1, dtype=torch.uint8)

        def differ(z: torch.Tensor) -> bool:
            return not torch.equal(
                guided_codes(z, odd, 1, PARITY), guided_codes(z, odd, 1, NEAREST)
            )

        assert [differ(z) for z in (inside, at, outside)] == [True, False, False]

    @pytest.mark.parametrize("bits", [3, 4])
    def test_they_are_one_with_a_whole_magnitude(self, bits: int) -> None:
        low = low_bits(CODE_BY_Z, bits)
        readings = [reconstruct(low, Z_BY_CODE, bits, rule) for rule in MatchRule]
        assert torch.equal(*readings)

    def test_three_bits_reconstruct_the_magnitude_with_the_sign_of_z(self) -> None:
        q_hat = reconstruct(low_bits(CODE_BY_Z, 3), Z_BY_CODE, 3)
        assert torch.equal(q_hat.abs(), decode_e2m1(CODE_BY_Z & 7))
        assert torch.equal(q_hat.signbit(), Z_BY_CODE.signbit())

    def test_four_bits_reconstruct_the_code_word_itself(self) -> None:
        q_hat = reconstruct(CODE_BY_Z, Z_BY_CODE, 4)
        assert torch.equal(q_hat, decode_e2m1(CODE_BY_Z))
        assert torch.equal(q_hat.signbit(), CODE_BY_Z > 7)

    def test_one_bit_parity_reconstructs_the_bracket_end_of_that_parity(self) -> None:
        low = low_bits(CODE_BY_Z, 1)
        lower, upper = bracket_e2m1(Z_BY_CODE)
        end = torch.where((lower & 1) == low, lower, upper)
        inside = lower != upper
        q_hat = reconstruct(low, Z_BY_CODE, 1).abs()
        assert torch.equal(q_hat[inside], decode_e2m1(end)[inside])

    @pytest.mark.parametrize("bits", [0, 5])
    def test_other_numbers_of_bits_are_refused(self, bits: int) -> None:
        with pytest.raises(ValueError, match="1 to 4 bits"):
            reconstruct(ALL_CODES, decode_e2m1(ALL_CODES), bits)
        with pytest.raises(ValueError, match="1 to 4 bits"):
            guided_codes(decode_e2m1(ALL_CODES), ALL_CODES, bits)


class TestPerSiteGuarantee:
    @settings(max_examples=500, deadline=None)
    @given(ANY_Z, st.integers(0, 15))
    def test_with_the_full_code_guidance_is_never_farther_than_rounding_to_nearest(
        self, z: float, rollout: int
    ) -> None:
        z_f32, record = torch.tensor([z]), torch.tensor([rollout], dtype=torch.uint8)
        q_roll = decode_e2m1(record)
        q_star = decode_e2m1(guided_codes(z_f32, record, 4))
        q_rtn = decode_e2m1(encode_e2m1(z_f32))
        assert (q_star - q_roll).abs() <= (q_rtn - q_roll).abs()

    def test_it_holds_for_every_code_word_on_the_grid(self) -> None:
        q_roll = decode_e2m1(CODE_BY_Z)
        q_star = decode_e2m1(guided_codes(Z_BY_CODE, CODE_BY_Z, 4))
        q_rtn = decode_e2m1(encode_e2m1(Z_BY_CODE))
        assert ((q_star - q_roll).abs() <= (q_rtn - q_roll).abs()).all()

    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    @settings(max_examples=200, deadline=None)
    @given(z=ANY_Z, take_upper=st.booleans())
    def test_a_rollout_code_that_is_a_bracket_end_is_found_again(
        self, bits: int, z: float, take_upper: bool
    ) -> None:
        z_f32 = torch.tensor([z])
        q_roll = bracket_e2m1(z_f32)[take_upper] | (8 if math.copysign(1, z) < 0 else 0)
        assert torch.equal(guided_codes(z_f32, low_bits(q_roll, bits), bits), q_roll)

    def test_one_bit_loses_it_when_the_rollout_code_is_outside_the_bracket(self) -> None:
        z, q_roll = torch.tensor([1.1]), torch.tensor([4], dtype=torch.uint8)  # bracket 1, 1.5
        assert decode_e2m1(guided_codes(z, low_bits(q_roll, 1), 1)).item() == 1.0
        assert decode_e2m1(guided_codes(z, q_roll, 4)).item() == 1.5

    def test_a_full_code_of_the_other_sign_takes_the_end_toward_zero(self) -> None:
        z = torch.tensor([0.3, -0.3, 2.9])
        record = torch.tensor([9, 7, 15], dtype=torch.uint8)
        assert guided_codes(z, record, 4).tolist() == [0, 8, 4]

    def test_the_example_of_the_paper_closes(self) -> None:
        """60.24 and 59.76 at scale 24 round to 3 and 2, 24 apart; guided, both are 3."""
        rollout, trainer = torch.tensor([60.24]) / 24, torch.tensor([59.76]) / 24
        record = encode_e2m1(rollout)
        assert decode_e2m1(record).item() == 3
        assert decode_e2m1(encode_e2m1(trainer)).item() == 2
        assert decode_e2m1(guided_codes(trainer, low_bits(record, 1), 1)).item() == 3


class TestGuidedQuantize:
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    @pytest.mark.parametrize("rule", MatchRule)
    def test_the_same_activation_gives_the_rollouts_codes(self, bits: int, rule: MatchRule) -> None:
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        rollout = quantize_nvfp4(x, token_scale(x))
        codes = guided_quantize(
            x, rollout.effective_scale(), low_bits(rollout.codes_u8, bits), bits, rule
        )
        off = codes != rollout.codes_u8
        if rule is PARITY or bits >= 3:
            assert not off.any()
        else:  # NEAREST may leave the rollout's code word only where the step doubles
            z = (x.float().unflatten(-1, (4, 16)) / rollout.effective_scale()[..., None]).flatten(1)
            assert (z.abs()[off] > 1.5).all()

    def test_a_slightly_different_activation_still_gives_them(self) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 256, generator=generator)
        rollout = quantize_nvfp4(x, token_scale(x))
        trainer = x + 0.002 * torch.randn(64, 256, generator=generator)
        scale = rollout.effective_scale()
        guided = guided_quantize(trainer, scale, low_bits(rollout.codes_u8, 1), 1)
        to_nearest = quantize_nvfp4(trainer, token_scale(trainer)).codes_u8
        guided_off = (decode_e2m1(guided) != decode_e2m1(rollout.codes_u8)).float().mean()
        assert guided_off < 1e-3
        assert (to_nearest != rollout.codes_u8).float().mean() > 1e-3

    def test_values_beyond_the_rollouts_range_are_clipped(self) -> None:
        x = torch.full((16,), -100.0)
        seven = torch.full((16,), 7, dtype=torch.uint8)
        assert guided_quantize(x, torch.ones(1), seven, 3).tolist() == [15] * 16

    @pytest.mark.parametrize("scale", [0.0, math.nan])
    def test_a_block_without_a_scale_has_codes_zero(self, scale: float) -> None:
        x = torch.full((16,), -3.0)
        record = torch.full((16,), 15, dtype=torch.uint8)
        assert guided_quantize(x, torch.tensor([scale]), record, 4).tolist() == [0] * 16

    def test_no_rows_are_fine(self) -> None:
        codes = torch.zeros(0, 32, dtype=torch.uint8)
        assert guided_quantize(torch.zeros(0, 32), torch.zeros(0, 2), codes, 1).shape == (0, 32)

    def test_it_never_reads_a_value_on_the_host(self) -> None:
        with FakeTensorMode():
            x = torch.empty(4, 64, dtype=torch.bfloat16)
            record = torch.empty(4, 64, dtype=torch.uint8)
            scale = torch.empty(4, 4)
            for bits in (1, 2, 3, 4):
                for rule in MatchRule:
                    x_hat = guided_fake_quantize(x, scale, record, bits, rule)
                    assert x_hat.shape == x.shape


class TestFakeQuantize:
    def test_guided_values_are_code_times_scale_in_the_inputs_dtype(self) -> None:
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        rollout = quantize_nvfp4(x, token_scale(x))
        record = low_bits(rollout.codes_u8, 1)
        x_hat = guided_fake_quantize(x, rollout.effective_scale(), record, 1)
        assert x_hat.dtype is torch.bfloat16
        assert torch.equal(x_hat, rollout.dequantize(torch.bfloat16))
        assert torch.equal(fake_quantize(x, token_scale(x)), x_hat)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_non_finite_activation_comes_out_as_nan(self, bad: float) -> None:
        x = torch.ones(32)
        x[20] = bad
        record = torch.zeros(32, dtype=torch.uint8)
        guided = guided_fake_quantize(x, torch.ones(2), record, 4)
        assert guided.isnan().nonzero().tolist() == [[20]]
        assert fake_quantize(x, torch.tensor(1.0))[16:].isnan().all()

    def test_a_nan_scale_of_the_rollout_comes_out_as_nan(self) -> None:
        record = torch.zeros(32, dtype=torch.uint8)
        x_hat = guided_fake_quantize(torch.ones(32), torch.tensor([1.0, math.nan]), record, 1)
        assert x_hat.isnan().tolist() == [False] * 16 + [True] * 16

    def test_the_gradient_passes_both_unchanged(self) -> None:
        x = torch.randn(2, 32, requires_grad=True)
        weight = torch.randn(2, 32)
        record = torch.zeros(2, 32, dtype=torch.uint8)
        for x_hat in (
            fake_quantize(x, token_scale(x)),
            guided_fake_quantize(x, torch.ones(2, 2), record, 1),
        ):
            (gradient,) = torch.autograd.grad((x_hat * weight).sum(), x)
            assert torch.equal(gradient, weight)


class TestStraightThrough:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_forward_is_bit_exact_and_backward_is_the_identity(self, dtype: torch.dtype) -> None:
        # x + (x_hat - x) would return 0 for the first and 1.0 for the last pair.
        x = torch.tensor([1e8, -0.0, 3.0, 1.0], dtype=dtype, requires_grad=True)
        x_hat = torch.tensor([1.0, -0.0, 2.0, 1e-8], dtype=dtype)
        out = straight_through(x, x_hat)
        gradient = torch.tensor([1.0, -2.0, 3.5, 0.1], dtype=dtype)
        out.backward(gradient)
        assert torch.equal(out.detach(), x_hat)
        assert out[1].signbit()
        assert x.grad is not None
        assert torch.equal(x.grad, gradient)

    def test_no_gradient_flows_into_the_rounded_value(self) -> None:
        x = torch.ones(2, requires_grad=True)
        x_hat = torch.ones(2, requires_grad=True)
        straight_through(x, x_hat).sum().backward()
        assert x_hat.grad is None

    @pytest.mark.parametrize("x_hat", [torch.ones(2, dtype=torch.bfloat16), torch.ones(1)])
    def test_another_shape_or_dtype_is_refused(self, x_hat: torch.Tensor) -> None:
        with pytest.raises(ValueError, match="straight-through"):
            straight_through(torch.ones(2), x_hat)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestCuda:
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    @pytest.mark.parametrize("rule", MatchRule)
    def test_it_gives_the_same_codes_as_the_cpu(self, bits: int, rule: MatchRule) -> None:
        low = low_bits(CODE_BY_Z, bits)
        on_cuda = guided_codes(Z_BY_CODE.cuda(), low.cuda(), bits, rule)
        assert torch.equal(on_cuda.cpu(), guided_codes(Z_BY_CODE, low, bits, rule))

    @pytest.mark.parametrize("bits", [1, 4])
    def test_the_host_never_waits_for_the_device(self, bits: int) -> None:
        x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
        torch.cuda.set_sync_debug_mode("error")
        try:
            rollout = quantize_nvfp4(x, token_scale(x))
            low = unpack_planes(pack_planes(rollout.codes_u8, bits), bits, 512)
            x_hat = guided_fake_quantize(x, rollout.effective_scale(), low, bits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(x_hat, rollout.dequantize(torch.bfloat16))
