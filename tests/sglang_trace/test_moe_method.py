"""The MoE method's weights: what it stores, and what happens when some are loaded again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
import torch
from torch import nn

from bridge.fp4 import quantize_weight
from sglang_trace.moe_method import TraceNvfp4MoEMethod, UnsupportedExperts, stored_matrices

EXPERTS, HIDDEN, WIDTH = 3, 64, 32
PREFIX = "model.layers.1.mlp.experts"


def load_anything(*_arguments: Any) -> None:
    """Stands for SGLang's weight loader."""


@pytest.fixture
def layer() -> nn.Module:
    made = nn.Module()
    TraceNvfp4MoEMethod().create_weights(
        made, EXPERTS, HIDDEN, WIDTH, torch.bfloat16, weight_loader=load_anything
    )
    generator = torch.Generator().manual_seed(0)
    for master in (made.w13_weight, made.w2_weight):
        master.data.copy_(torch.randn(master.shape, generator=generator))
    made.w13_weight.data[1] *= 40
    TraceNvfp4MoEMethod().process_weights_after_loading(made)
    return made


def matrices_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The BF16 matrices under their Hugging Face names."""
    found = {}
    for expert in range(EXPERTS):
        gate, up = layer.w13_weight.data[expert].chunk(2)
        for name, matrix in (("gate", gate), ("up", up), ("down", layer.w2_weight.data[expert])):
            found[f"{PREFIX}.{expert}.{name}_proj.weight"] = matrix
    return found


def test_every_matrix_is_stored_as_the_shared_quantizer_makes_it(layer: nn.Module) -> None:
    stored = dict(stored_matrices(layer, PREFIX))
    expected = matrices_of(layer)
    assert stored.keys() == expected.keys()
    for name, matrix in expected.items():
        fp4 = quantize_weight(matrix)
        assert torch.equal(stored[name].codes_u8, fp4.codes_u8)
        assert torch.equal(stored[name].scales_u8, fp4.scales_u8)
        assert torch.equal(stored[name].global_scale, fp4.global_scale)


def test_the_gemms_see_exactly_the_stored_numbers(layer: nn.Module) -> None:
    for expert in range(EXPERTS):
        stored = dict(stored_matrices(layer, PREFIX))
        names = [f"{PREFIX}.{expert}.{name}_proj.weight" for name in ("gate", "up", "down")]
        gate, up, down = (stored[name].dequantize(torch.bfloat16).float() for name in names)
        assert torch.equal(layer.w13_hat[expert].float(), torch.cat((gate, up)))
        assert torch.equal(layer.w2_hat[expert].float(), down)


def test_a_partial_update_requantizes_from_the_masters(layer: nn.Module) -> None:
    before = {name: fp4.codes_u8.clone() for name, fp4 in stored_matrices(layer, PREFIX)}
    layer.w2_weight.data[2] += 1
    TraceNvfp4MoEMethod().process_weights_after_loading(layer)
    changed = {
        name
        for name, fp4 in stored_matrices(layer, PREFIX)
        if not torch.equal(fp4.codes_u8, before[name])
    }
    assert changed == {f"{PREFIX}.2.down_proj.weight"}


def test_codes_and_scales_are_part_of_the_state_and_the_copies_are_not(layer: nn.Module) -> None:
    assert set(layer.state_dict()) == {
        *("w13_weight", "w13_codes", "w13_scales", "w2_weight", "w2_codes", "w2_scales"),
        *("gate_scale", "up_scale", "down_scale"),
    }


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
