"""The MoE layer in kernels against the reference, stage by stage and as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge.fp4.nvfp4 import pack_nibbles, quantize_weight
from bridge.layout import Site
from sglang_trace.kernels.combine import combine
from sglang_trace.kernels.grouped_gemm import DECODE, FEW, PREFILL, TileShape, multiply
from sglang_trace.kernels.moe import ExpertWeights, Workspace, run_experts, tile_shape
from sglang_trace.kernels.tiles import most_tiles, sort_rows
from sglang_trace.quantization import reference
from tests.sglang_trace.kernels.inputs import DEVICE, natural_order, needs_gpu, operand_order
from tests.sglang_trace.kernels.staged import empty_rows, layout_of, place_of

# One unit in the last place of FP32 sums, and half of one of BF16 results.
FP32_ULP, BF16_HALF = 2.0**-23, 2.0**-8


@dataclass
class Layer:
    """Experts as stored and the same numbers as float32 matrices, on the device under test."""

    weights: ExpertWeights
    w13_hat: Tensor
    w2_hat: Tensor


def make_layer(experts: int, hidden: int, width: int, seed: int) -> Layer:
    """Random experts; every matrix has another magnitude, so another global scale."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    where = {"generator": generator, "device": DEVICE}

    def matrices(out: int, into: int) -> list[Tensor]:
        spread = 2.0 ** torch.randint(-6, 4, (experts, 1, 1), **where)
        w = torch.randn(experts, out, into, **where) * spread
        w[:, ::5, :16] *= 2.0**-15  # block scales that are subnormal in E4M3
        w[:, ::7, 16:32] = 0.0
        return list(w.bfloat16())

    gate, up, down = matrices(width, hidden), matrices(width, hidden), matrices(hidden, width)
    fp4 = {
        name: [quantize_weight(w) for w in ws]
        for name, ws in (("gate", gate), ("up", up), ("down", down))
    }
    codes = {name: torch.stack([pack_nibbles(q.codes_u8) for q in qs]) for name, qs in fp4.items()}
    scales = {name: torch.stack([q.scales_u8 for q in qs]) for name, qs in fp4.items()}
    hats = {name: torch.stack([q.dequantize() for q in qs]) for name, qs in fp4.items()}
    globals_ = {name: torch.stack([q.global_scale for q in qs]) for name, qs in fp4.items()}
    return Layer(
        ExpertWeights(
            torch.cat((codes["gate"], codes["up"]), 1),
            torch.cat((scales["gate"], scales["up"]), 1),
            codes["down"],
            scales["down"],
            globals_["gate"],
            globals_["up"],
            globals_["down"],
        ),
        torch.cat((hats["gate"], hats["up"]), 1),
        hats["down"],
    )


def make_inputs(
    tokens: int, hidden: int, slots: int, experts: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, router weights and expert ids, each token's experts distinct."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).topk(slots).indices.int()
    weights = torch.softmax(torch.randn(tokens, slots, generator=generator), -1)
    return x.to(DEVICE), weights.to(DEVICE), ids.to(DEVICE)


def excess(y: Tensor, x_hat: Tensor, w_hat: Tensor) -> float:
    """How far rows y = w_hat @ x_hat are beyond the stated bound, in units of it; at most 1."""
    exact = torch.einsum("roi,ri->ro", w_hat.double(), x_hat.double())
    magnitude = torch.einsum("roi,ri->ro", w_hat.double().abs(), x_hat.double().abs())
    terms = x_hat.shape[1] + 1
    allowed = terms * FP32_ULP * magnitude * (1 + BF16_HALF) + BF16_HALF * exact.abs() + 1e-38
    return float(((y.double() - exact).abs() / allowed).max())


def first_gemm(layer: Layer, x_hat: Tensor, ids: Tensor, shape: TileShape, native: bool) -> Tensor:
    """Run fc1's GEMM on quantized tokens."""
    weights, (experts, outputs) = layer.weights, layer.w13_hat.shape[:2]
    tokens, slots = ids.shape
    most = most_tiles(ids.numel(), experts, shape.rows)
    row_of = torch.empty(most, shape.rows, dtype=torch.int32, device=DEVICE)
    expert_of = torch.empty(most, dtype=torch.int32, device=DEVICE)
    count = torch.empty(1, dtype=torch.int32, device=DEVICE)
    sort_rows(ids.flatten(), experts, shape.rows, row_of, expert_of, count)
    y = torch.full((tokens * slots, outputs), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    multiply(
        operand_order(x_hat),
        weights.w13_codes,
        weights.w13_scales,
        weights.gate_scale,
        weights.up_scale,
        y,
        row_of,
        expert_of,
        count,
        most,
        slots,
        shape,
        native,
    )
    return y


def check_gemm(layer: Layer, x: Tensor, ids: Tensor, shape: TileShape, native: bool) -> float:
    """Compare every row of fc1's GEMM with its expert's."""
    tokens, slots = ids.shape
    x_hat = reference.quantize_activation(x).dequantize(torch.bfloat16)
    y = first_gemm(layer, x_hat, ids, shape, native)
    rows_of_x = torch.arange(tokens, device=DEVICE).repeat_interleave(slots)
    worst = 0.0
    for piece in torch.arange(tokens * slots, device=DEVICE).split(64):
        w_hat = layer.w13_hat[ids.flatten()[piece].long()]
        worst = max(worst, excess(y[piece], x_hat[rows_of_x[piece]], w_hat))
    return worst


NATIVE = DEVICE == "cuda"
SMALL = TileShape(rows=16, outputs=64, words=16, warps=4, stages=2)


@pytest.mark.parametrize("shape", [FEW, DECODE, PREFILL, SMALL])
@pytest.mark.parametrize("size", [(32, 32), (160, 96), (256, 64)])
def test_the_gemm_keeps_its_bound(size: tuple[int, int], shape: TileShape) -> None:
    hidden, width = size
    layer = make_layer(4, hidden, width, 1)
    x, _weights, ids = make_inputs(7, hidden, 2, 4, 2)
    assert check_gemm(layer, x, ids, shape, NATIVE) <= 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), tokens=st.integers(1, 40), slots=st.integers(1, 3))
def test_the_gemm_keeps_its_bound_for_any_routes(seed: int, tokens: int, slots: int) -> None:
    layer = make_layer(3, 64, 32, seed)
    x, _weights, ids = make_inputs(tokens, 64, slots, 3, seed)
    assert check_gemm(layer, x, ids, DECODE, NATIVE) <= 1


def test_an_expert_with_a_non_finite_weight_gives_nan() -> None:
    layer = make_layer(3, 64, 32, 3)
    broken = torch.randn(32, 64).bfloat16()
    broken[4, 4] = torch.inf
    fp4 = quantize_weight(broken.to(DEVICE))
    layer.weights.w13_codes[1, :32] = pack_nibbles(fp4.codes_u8)
    layer.weights.w13_scales[1, :32] = fp4.scales_u8
    layer.weights.gate_scale[1] = fp4.global_scale
    x, router, ids = make_inputs(5, 64, 2, 3, 4)
    ids[:] = torch.tensor([0, 2])
    ids[3] = torch.tensor([1, 2])
    out = run(layer, x, router, ids)
    assert bool(out[3].isnan().all())
    assert not bool(out[[0, 1, 2, 4]].isnan().any())


def run(layer: Layer, x: Tensor, router: Tensor, ids: Tensor) -> Tensor:
    """Run the kernels and record nothing."""
    tokens, slots = ids.shape
    experts, both = layer.w13_hat.shape[:2]
    workspace = Workspace(tokens, slots, x.shape[1], both // 2, experts, DEVICE)
    out = torch.full_like(x, torch.nan)
    run_experts(x, router, ids, layer.weights, workspace, None, out)
    return out


def check_layer(
    layer: Layer, x: Tensor, router: Tensor, ids: Tensor, bits: int
) -> tuple[float, float]:
    """Run kernels and reference. Returns (rows of fc2 equal, relative error of the output)."""
    tokens, slots = ids.shape
    experts, both = layer.w13_hat.shape[:2]
    layout = layout_of(x.shape[1], both // 2, slots, bits)
    workspace = Workspace(tokens + 3, slots, x.shape[1], both // 2, experts, DEVICE)
    place = place_of(layout, tokens, 1)
    out = torch.full_like(x, torch.nan)
    run_experts(x, router, ids, layer.weights, workspace, place, out)

    wanted = empty_rows(layout, tokens).to(DEVICE)

    class Recorder:
        def routes(self, ids_TK: Tensor) -> None:
            layout.write_routes(wanted, 1, ids_TK)

        def fc1(self, x_TH: reference.Fp4Tensor) -> None:
            self.write(Site.FC1, x_TH)

        def fc2(self, h_TKI: reference.Fp4Tensor) -> None:
            self.write(Site.FC2, h_TKI)

        def write(self, site: Site, fp4: reference.Fp4Tensor) -> None:
            layout.write_site(wanted, site, 1, fp4.codes_u8, fp4.scales_u8, fp4.global_scale)

    expected = reference.run_experts(x, router, ids, layer.w13_hat, layer.w2_hat, Recorder())
    rows = place.rows_MB
    for site, layer_id in ((Site.ROUTES, 1), (Site.FC1, 1)):
        columns = layout.columns(site, layer_id)
        assert torch.equal(rows[:, columns], wanted[:, columns])
    fc2 = layout.columns(Site.FC2, 1)
    equal = (rows[:, fc2] == wanted[:, fc2]).float().mean().item()
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    return equal, float(error)


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_the_layer_is_the_reference_but_for_the_order_of_sums(tokens: int) -> None:
    layer = make_layer(5, 96, 64, 5)
    equal, error = check_layer(layer, *make_inputs(tokens, 96, 3, 5, tokens), bits=4)
    assert equal >= 0.99
    assert error <= 2.0**-7


def test_given_equal_gate_and_up_fc2_is_equal_and_the_output_keeps_its_bound() -> None:
    layer = make_layer(4, 64, 96, 6)
    x, router, ids = make_inputs(6, 64, 2, 4, 7)
    workspace = Workspace(6, 2, 64, 96, 4, DEVICE)
    out = torch.empty_like(x)
    run_experts(x, router, ids, layer.weights, workspace, None, out)
    # The workspace still holds fc2's operand and the down projection's rows.
    h_hat = natural_order(workspace.operand(12, 96))
    y = workspace.output(12, 64)
    assert excess(y, h_hat, layer.w2_hat[ids.flatten().long()]) <= 1
    exact = (y.view(6, 2, 64).double() * router.double().unsqueeze(-1)).sum(1)
    magnitude = (y.view(6, 2, 64).double() * router.double().unsqueeze(-1)).abs().sum(1)
    assert bool(
        ((out.double() - exact).abs() <= BF16_HALF * exact.abs() + 3 * FP32_ULP * magnitude).all()
    )


def test_slots_without_an_expert_here_count_nothing() -> None:
    layer = make_layer(4, 64, 96, 8)
    x, router, ids = make_inputs(6, 64, 2, 4, 9)
    alone = run(layer, x, router[:, :1].contiguous(), ids[:, :1].contiguous())
    ids[:, 1] = -1
    assert torch.equal(run(layer, x, router, ids), alone)


def test_a_tokens_result_does_not_depend_on_the_others() -> None:
    layer = make_layer(4, 64, 96, 10)
    x, router, ids = make_inputs(9, 64, 2, 4, 11)
    together = run(layer, x, router, ids)
    for token in (0, 4, 8):
        row = slice(token, token + 1)
        assert torch.equal(run(layer, x[row], router[row], ids[row]), together[row])


def test_recording_does_not_change_the_result() -> None:
    layer = make_layer(4, 64, 96, 12)
    x, router, ids = make_inputs(5, 64, 2, 4, 13)
    workspace = Workspace(5, 2, 64, 96, 4, DEVICE)
    out = torch.empty_like(x)
    place = place_of(layout_of(64, 96, 2, 1), 5, 2)
    run_experts(x, router, ids, layer.weights, workspace, place, out)
    assert torch.equal(out, run(layer, x, router, ids))


def test_combine_skips_rows_that_nobody_wrote() -> None:
    y = torch.full((4, 32), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    y[0] = 2.0
    out = torch.empty(2, 32, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.tensor([[1, -1], [-1, 9]], device=DEVICE)
    combine(y, torch.full((2, 2), 0.5, device=DEVICE), ids, 3, out)
    assert out[:, 0].tolist() == [1.0, 0.0]


def test_no_tokens_are_no_work() -> None:
    layer = make_layer(2, 32, 32, 14)
    x, router, ids = make_inputs(0, 32, 2, 2, 15)
    assert run(layer, x, router, ids).shape == (0, 32)


def test_tiles_are_chosen_by_the_rows_of_an_expert() -> None:
    assert tile_shape(rows=1 * 8, num_experts=128) is FEW
    assert tile_shape(rows=8 * 8, num_experts=128) is DECODE
    assert tile_shape(rows=128 * 8, num_experts=128) is DECODE
    assert tile_shape(rows=16384 * 8, num_experts=128) is PREFILL


@pytest.fixture(scope="module")
def real_layer() -> Layer:
    return make_layer(128, 2048, 768, 16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 2048])
def test_a_real_layer_on_a_gpu(real_layer: Layer, tokens: int) -> None:
    layer = real_layer
    inputs = make_inputs(tokens, 2048, 8, 128, tokens)
    equal, error = check_layer(layer, *inputs, bits=4)
    print(f"{tokens} tokens: fc2 bytes equal {equal:.6f}, relative error {error:.2e}")
    assert equal >= 0.99
    assert error <= 2.0**-7
    shape = tile_shape(tokens * 8, 128)
    few = min(tokens, 256)
    assert check_gemm(layer, inputs[0][:few], inputs[2][:few], shape, native=True) <= 1


@pytest.mark.gpu
@needs_gpu
def test_the_tile_does_not_change_a_bit(real_layer: Layer) -> None:
    """So a token's result is the same in a batch of one and in a prefill."""
    x, _weights, ids = make_inputs(40, 2048, 8, 128, 26)
    x_hat = reference.quantize_activation(x).dequantize(torch.bfloat16)
    decode = first_gemm(real_layer, x_hat, ids, DECODE, native=True)
    for shape in (FEW, PREFILL):
        assert torch.equal(first_gemm(real_layer, x_hat, ids, shape, native=True), decode), shape


@pytest.mark.gpu
@needs_gpu
def test_both_ways_to_convert_code_words_agree_on_a_gpu() -> None:
    layer = make_layer(8, 2048, 768, 17)
    x, _weights, ids = make_inputs(64, 2048, 2, 8, 18)
    assert check_gemm(layer, x, ids, SMALL, native=False) <= 1
    assert check_gemm(layer, x, ids, SMALL, native=True) <= 1


@pytest.mark.gpu
@needs_gpu
def test_a_cuda_graph_replays_with_new_tokens_and_new_weights() -> None:
    layer, other = make_layer(16, 256, 128, 19), make_layer(16, 256, 128, 20)
    x, router, ids = make_inputs(24, 256, 4, 16, 21)
    layout = layout_of(256, 128, 4, 1)
    place = place_of(layout, 32, 1)
    workspace = Workspace(24, 4, 256, 128, 16, DEVICE)
    out = torch.empty_like(x)
    run_experts(x, router, ids, layer.weights, workspace, place, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_experts(x, router, ids, layer.weights, workspace, place, out)
    for source, seed in ((layer, 22), (other, 23)):
        for name, tensor in vars(source.weights).items():
            getattr(layer.weights, name).copy_(tensor)
        for held, new in zip((x, router, ids), make_inputs(24, 256, 4, 16, seed), strict=True):
            held.copy_(new)
        graph.replay()
        fresh = place_of(layout, 32, 1)
        expected = torch.empty_like(x)
        run_experts(x, router, ids, source.weights, workspace, fresh, expected)
        assert torch.equal(out, expected)
        assert torch.equal(place.rows_MB, fresh.rows_MB)


@pytest.mark.gpu
@needs_gpu
def test_the_layer_never_waits_for_the_gpu() -> None:
    layer = make_layer(16, 256, 128, 24)
    inputs = make_inputs(24, 256, 4, 16, 25)
    run(layer, *inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(layer, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gate_up_of_the_reference_is_silu_times_up() -> None:
    """The reference that `slot_rows` follows rounds silu and the product to BF16, each once."""
    both = torch.randn(4, 32).bfloat16()
    identity = torch.eye(32).bfloat16()[None]
    h = reference.gate_up(both, identity, torch.zeros(4, 1, dtype=torch.int64), torch.bfloat16)
    assert torch.equal(h[:, 0], F.silu(both[:, :16]) * both[:, 16:])
