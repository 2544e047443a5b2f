"""Grouped experts compute bit for bit what sequential ones compute, and train like them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference_rollout import Weights
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_rank")

Build = Callable[..., Any]
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def build_grouped(build_fp4: Build) -> Build:
    def make(**overrides: Any) -> Any:
        from grouped_linear import grouped_experts

        with grouped_experts():
            model = build_fp4(moe_grouped_gemm=True, **overrides)
        assert type(model.decoder.layers[0].mlp.experts).__name__ == "TEGroupedMLP"
        return model

    return make


@pytest.fixture(scope="module")
def build_fused(build: Build) -> Build:
    """As `build_grouped`, with experts whose backward writes to `main_grad` itself."""

    def make() -> Any:
        from grouped_linear import grouped_experts

        from megatron_trace import TraceTrainerConfig, enable_fp4

        with grouped_experts():
            model = build(moe_grouped_gemm=True)
        for layer in model.decoder.layers:
            layer.mlp.experts.linear_fc1.fuse_wgrad_accumulation = True
            layer.mlp.experts.linear_fc2.fuse_wgrad_accumulation = True
        enable_fp4(model, TraceTrainerConfig(weight_dtype=torch.float32))
        return model

    return make


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(9, 14, seed=3)


@pytest.fixture(scope="module")
def records(lib: Any, weights: Weights, sequences: list[Tensor]) -> Any:
    return lib.roll_out(weights, sequences, noise=0.02)[0]


@pytest.fixture
def no_fp8(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing `moe_act` asks Transformer Engine whether FP8 is on."""
    from megatron.core.tensor_parallel import random

    manager = SimpleNamespace(is_fp8_enabled=lambda: False)
    monkeypatch.setattr(random, "FP8GlobalStateManager", manager, raising=False)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        monkeypatch.setattr(random, name, lambda **_: nullcontext(), raising=False)


def hf_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients by Hugging Face name, in which both kinds of experts agree."""
    from megatron_trace.hf.local_part import LocalPart
    from megatron_trace.hf.mapping import split

    part, grads = LocalPart(model), {}
    for name, parameter in model.named_parameters():
        source = part.source(name)
        grads |= dict(zip(source.names, split(source, parameter.grad, model.config), strict=True))
    return grads


def step(lib: Any, model: Any, sequences: Any, records: Any) -> tuple[Tensor, Any]:
    micro_batch = lib.packed(records, sequences, compare=True)
    logits = lib.packed_logits(model, sequences, micro_batch)
    lib.loss_of(logits, sequences).backward()
    return logits.detach(), micro_batch.report()


@pytest.mark.parametrize("settings", [{}, RECOMPUTED, {"moe_router_fusion": True}])
def test_a_guided_step_is_that_of_sequential_experts(
    no_fp8: None,
    lib: Any,
    build_fp4: Build,
    build_grouped: Build,
    sequences: Any,
    records: Any,
    settings: dict[str, Any],
) -> None:
    sequential, grouped = build_fp4(), build_grouped(**settings)
    expected, expected_report = step(lib, sequential, sequences, records)
    logits, report = step(lib, grouped, sequences, records)
    assert torch.equal(logits, expected)
    assert report == expected_report
    ours, theirs = hf_gradients(grouped), hf_gradients(sequential)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_without_records_every_row_is_rounded_to_nearest(
    lib: Any, build_fp4: Build, build_grouped: Build, sequences: Any
) -> None:
    expected = lib.packed_logits(build_fp4(), sequences, None)
    assert torch.equal(lib.packed_logits(build_grouped(), sequences, None), expected)


def test_fused_gradients_reach_the_parameters_main_grad(
    lib: Any, build_grouped: Build, build_fused: Build, sequences: Any, records: Any
) -> None:
    from megatron_trace.layers.expert_linears import weights_of

    plain, fused = build_grouped(), build_fused()
    names = ("linear_fc1", "linear_fc2")
    parameters = [
        parameter
        for layer in fused.decoder.layers
        for name in names
        for parameter in weights_of(layer.mlp.experts, name)
    ]
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    for _ in range(2):
        step(lib, plain, sequences, records)
        step(lib, fused, sequences, records)
    expected = [
        parameter.grad
        for layer in plain.decoder.layers
        for name in names
        for parameter in weights_of(layer.mlp.experts, name)
    ]
    for parameter, grad in zip(parameters, expected, strict=True):
        assert parameter.grad_added_to_main_grad
        assert torch.equal(parameter.main_grad, grad)
    # As Transformer Engine's, the gradients that go through autograd mean nothing.
    assert all(parameter.grad.isnan().all() for parameter in parameters)


def test_frozen_experts_get_no_gradient_and_no_mark(
    lib: Any, build_fused: Build, sequences: Any, records: Any
) -> None:
    model = build_fused()
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    for parameter in experts:
        parameter.requires_grad_(False)
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    step(lib, model, sequences, records)
    assert all(p.grad is None and not p.grad_added_to_main_grad for p in experts)
    assert model.decoder.layers[0].mlp.router.weight.grad.abs().max() > 0


@pytest.mark.parametrize(("bias", "recomputed"), [(True, False), (False, True)])
def test_probabilities_learn_from_fc2s_output_where_its_input_does_not_say_it_all(
    bias: bool, recomputed: bool
) -> None:
    from megatron_trace.layers.expert_linears import ExpertLinears

    config = SimpleNamespace(add_bias_linear=bias)
    experts = SimpleNamespace(config=config, activation_recompute=recomputed)
    assert not ExpertLinears(experts, gated=True, rollout_dtype=torch.float32).sees_all_rows
    experts = SimpleNamespace(config=SimpleNamespace(add_bias_linear=False))
    assert ExpertLinears(experts, gated=True, rollout_dtype=torch.float32).sees_all_rows


def test_changed_weights_are_rounded_again(lib: Any, build_grouped: Build, sequences: Any) -> None:
    from megatron_trace import free_rounded_weights

    model = build_grouped()
    before = lib.packed_logits(model, sequences, None)
    with torch.no_grad():
        model.decoder.layers[1].mlp.experts.linear_fc1.weight3.mul_(1.5)
    after = lib.packed_logits(model, sequences, None)
    assert not torch.equal(before, after)
    assert free_rounded_weights(model) > 0
    assert free_rounded_weights(model) == 0
    assert torch.equal(lib.packed_logits(model, sequences, None), after)


def test_switched_off_nothing_is_rounded(
    lib: Any, build: Build, build_grouped: Build, sequences: Any
) -> None:
    from megatron_trace import disable_fp4

    model = build_grouped()
    disable_fp4(model)
    expected = lib.packed_logits(build(), sequences, None)
    assert torch.equal(lib.packed_logits(model, sequences, None), expected)


def test_grouped_layers_that_do_not_ask_for_rounded_weights_are_refused(
    build_grouped: Build,
) -> None:
    from megatron_trace import enable_fp4
    from megatron_trace.preflight.unsupported import UnsupportedModel

    model = build_grouped()
    linear = model.decoder.layers[2].mlp.experts.linear_fc2

    def own_weights(self: Any) -> list[Tensor]:
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    linear.__class__ = type("Other", (type(linear),), {"_get_weight_tensors": own_weights})
    with pytest.raises(UnsupportedModel, match="Other does not ask our hook for its weights"):
        enable_fp4(model)


def test_a_checkpoint_goes_through_grouped_experts_unchanged(
    build_grouped: Build, weights: Weights
) -> None:
    from megatron_trace.hf import export_hf

    exported = dict(export_hf(build_grouped()))
    assert exported.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(exported[name], weights[name])] == []
