"""The MoE method's weights: what it stores, and what happens when some are loaded again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
import torch
from torch import nn

from bridge.fp4.digest import digest
from bridge.fp4.nvfp4 import quantize_weight
from bridge.layout import ModelShape, RecordLayout, Site
from sglang_trace.capture.staging import Staging
from sglang_trace.quantization.expert_weights import Experts, ExpertsNotLoaded, WidthPart
from sglang_trace.quantization.moe_method import TraceNvfp4MoEMethod, UnsupportedExperts

EXPERTS, HIDDEN, WIDTH = 3, 64, 32
SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}


def load(layer: nn.Module, expert: int, projection: str, matrix: torch.Tensor) -> None:
    """Hand a matrix over as SGLang does: through the parameter that the model names."""
    shard = SHARDS[projection]
    param = layer.w2_weight if shard == "w2" else layer.w13_weight
    param.weight_loader(param, matrix, f"{projection}_proj", shard_id=shard, expert_id=expert)


@pytest.fixture
def matrices() -> dict[tuple[int, str], torch.Tensor]:
    """BF16 matrices by expert and projection, in no order of the layer's."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"down": (HIDDEN, WIDTH), "up": (WIDTH, HIDDEN), "gate": (WIDTH, HIDDEN)}
    made = {
        (expert, name): torch.randn(shape, generator=generator).bfloat16()
        for name, shape in shapes.items()
        for expert in reversed(range(EXPERTS))
    }
    made[1, "gate"] *= 40
    return made


@pytest.fixture
def layer(matrices: dict[tuple[int, str], torch.Tensor]) -> Any:
    made: Any = nn.Module()
    made.quant_method = TraceNvfp4MoEMethod()
    made.quant_method.create_weights(made, EXPERTS, HIDDEN, WIDTH, torch.bfloat16)
    for (expert, projection), matrix in matrices.items():
        load(made, expert, projection, matrix)
    made.quant_method.process_weights_after_loading(made)
    return made


def test_every_matrix_is_stored_as_the_shared_quantizer_makes_it(
    layer: Any, matrices: dict[tuple[int, str], torch.Tensor]
) -> None:
    for place, matrix in matrices.items():
        stored, fp4 = layer.quant_method.experts.matrix(*place), quantize_weight(matrix)
        assert torch.equal(stored.codes_u8, fp4.codes_u8)
        assert torch.equal(stored.scales_u8, fp4.scales_u8)
        assert torch.equal(stored.global_scale, fp4.global_scale)
        assert layer.quant_method.experts.digest(*place) == digest(fp4)


def test_the_gemms_see_exactly_the_stored_numbers(layer: Any) -> None:
    for expert in range(EXPERTS):
        stored = {name: layer.quant_method.experts.matrix(expert, name) for name in SHARDS}
        gate, up, down = (stored[name].dequantize() for name in ("gate", "up", "down"))
        assert torch.equal(layer.w13_hat[expert], torch.cat((gate, up)))
        assert torch.equal(layer.w2_hat[expert], down)


def test_an_update_changes_the_matrices_it_brings_in_place_and_no_other(
    layer: Any, matrices: dict[tuple[int, str], torch.Tensor]
) -> None:
    experts = layer.quant_method.experts
    assert experts.take_changed() == sorted(matrices)
    before = {place: experts.digest(*place) for place in matrices}
    addresses = {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()}
    load(layer, 2, "down", matrices[2, "down"] + 1)
    changed = {place for place in matrices if experts.digest(*place) != before[place]}
    assert changed == {(2, "down")} == set(experts.take_changed())
    assert {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()} == addresses
    experts.check()


def test_tensors_that_an_update_replaced_are_refused(layer: Any) -> None:
    layer.w2_weight.data = layer.w2_weight.data.clone()
    with pytest.raises(ExpertsNotLoaded, match="CUDA graphs do not see"):
        layer.quant_method.experts.check()


def test_a_matrix_that_the_checkpoint_lacks_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = nn.Module()
    method = TraceNvfp4MoEMethod()
    method.create_weights(layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16)
    load(layer, 0, "up", torch.ones(WIDTH, HIDDEN))
    with pytest.raises(ExpertsNotLoaded, match="8 of 9 expert matrices"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize(("expert", "rows"), [(EXPERTS, WIDTH), (0, WIDTH // 2)])
def test_a_matrix_split_over_ranks_is_refused(layer: Any, expert: int, rows: int) -> None:
    with pytest.raises(ExpertsNotLoaded, match="without --ep-size"):
        load(layer, expert, "up", torch.ones(rows, HIDDEN))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_a_matrix_that_is_quantized_already_is_refused(layer: Any, dtype: torch.dtype) -> None:
    with pytest.raises(ExpertsNotLoaded, match="serve and send weights in BF16"):
        load(layer, 0, "up", torch.ones(WIDTH, HIDDEN).to(dtype))


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_hold_parts_of_the_matrix_that_was_quantized_whole(
    size: int, matrices: dict[tuple[int, str], torch.Tensor]
) -> None:
    wide = {
        (expert, name): matrix.repeat(*((1, 2) if name == "down" else (2, 1)))
        for (expert, name), matrix in matrices.items()
    }
    ranks = [
        Experts(nn.Module(), EXPERTS, HIDDEN, 2 * WIDTH // size, torch.bfloat16, WidthPart(r, size))
        for r in range(size)
    ]
    for (expert, name), matrix in wide.items():
        whole = quantize_weight(matrix)
        for rank in ranks:
            rank.load(expert, name, matrix)
            assert rank.digest(expert, name) == digest(whole)
        parts = [rank.matrix(expert, name) for rank in ranks]
        along = 1 if name == "down" else 0
        assert torch.equal(torch.cat([part.codes_u8 for part in parts], along), whole.codes_u8)
        assert torch.equal(torch.cat([part.scales_u8 for part in parts], along), whole.scales_u8)
        assert all(torch.equal(part.global_scale, whole.global_scale) for part in parts)
        stacked = [rank._hat(name, expert) for rank in ranks]
        assert torch.equal(torch.cat(stacked, along), whole.dequantize())
    assert all(rank.take_changed() == sorted(wide) for rank in ranks)


def test_dummy_weights_are_all_there_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = nn.Module()
    method = TraceNvfp4MoEMethod()
    method.create_weights(layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16)
    monkeypatch.setattr(
        "sglang_trace.quantization.moe_method.get_model",
        lambda: SimpleNamespace(load_format="dummy"),
    )
    method.process_weights_after_loading(layer)
    for expert in range(EXPERTS):
        for name in SHARDS:
            values = method.experts.matrix(expert, name).dequantize()
            assert values.abs().max() <= 1.2e-3
            assert values.std() > 1e-4


def test_codes_and_scales_are_the_state(layer: Any) -> None:
    assert set(layer.state_dict()) == {
        *("w13_weight", "w13_scales", "w2_weight", "w2_scales"),
        *("gate_scale", "up_scale", "down_scale"),
    }


def test_the_kernels_compute_what_the_reference_does_and_record_the_same(layer: Any) -> None:
    """On a CPU in Triton's interpreter; the numbers are such that every FP32 sum is exact."""
    generator = torch.Generator().manual_seed(3)
    shape = ModelShape(2, HIDDEN, WIDTH, EXPERTS, 2, 1, 16, (0, 1), (0, 1))
    layout = RecordLayout(shape, (1,), (Site.FC1, Site.FC2, Site.ROUTES), bits=4)
    for expert in range(EXPERTS):
        for name, (out, into) in {
            "gate": (WIDTH, HIDDEN),
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
        }.items():
            load(layer, expert, name, torch.randint(-3, 4, (out, into), generator=generator) * 0.5)
    x = (torch.randint(-6, 7, (5, HIDDEN), generator=generator) * 0.5).bfloat16()
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25]]).expand(5, 2).contiguous()
    results, records = [], []
    for kernels in (False, True):
        staging = Staging(layout, 8, "cpu")
        layer.quant_method.recorder = staging.recorder(1)
        if kernels:
            results.append(layer.quant_method.run_kernels(x, weights, ids))
        else:
            dispatched = SimpleNamespace(hidden_states=x, topk_output=(weights, ids, None))
            results.append(layer.quant_method.apply(layer, dispatched).hidden_states)
        records.append(staging.rows_MB)
    assert torch.equal(*results)
    assert torch.equal(*records)
    assert records[0].any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "gelu"}, "an activation other than silu"),
        ({"is_gated": False}, "no gate"),
        ({"apply_router_weight_on_input": True}, "router weights before fc1"),
        ({"swiglu_limit": 7.0}, "a clamped SwiGLU"),
        ({"gemm1_beta": 1.0}, "a shifted SwiGLU"),
        ({"silu_mul_keep_fp32": True}, "a SwiGLU in FP32"),
        ({"num_fused_shared_experts": 1}, "fused shared experts"),
        ({"routed_scaling_factor": 2.5}, "a routed scaling factor"),
    ],
)
def test_experts_that_compute_something_else_are_refused(
    change: dict[str, Any], reason: str
) -> None:
    usual = {
        "activation": "silu",
        "is_gated": True,
        "apply_router_weight_on_input": False,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
        "num_fused_shared_experts": 0,
        "routed_scaling_factor": None,
    }
    method = TraceNvfp4MoEMethod()
    method.create_moe_runner(nn.Module(), SimpleNamespace(**usual))
    with pytest.raises(UnsupportedExperts, match=reason):
        method.create_moe_runner(nn.Module(), SimpleNamespace(**{**usual, **change}))
