"""Backward passes: recomputation, interleaved micro-batches, gradients, and FP4 switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_rollout import SHAPE, Weights
from torch import Tensor

from bridge.fp4.nvfp4 import token_scale
from bridge.layout import Site
from megatron_trace.rounding.rows import round_rows

pytestmark = pytest.mark.usefixtures("one_rank")

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE_RECOMPUTE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "moe"],
}


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def batches(lib: Any, weights: Weights) -> list[tuple[Any, Any]]:
    """Two micro-batches of sequences and their records, of different shapes."""
    made = []
    for lengths, seed in (((9, 6), 1), ((7, 12, 5), 2)):
        sequences = lib.random_sequences(*lengths, seed=seed)
        made.append((sequences, lib.roll_out(weights, sequences, noise=0.02)[0]))
    return made


def step(lib: Any, model: Any, batch: tuple[Any, Any]) -> tuple[Tensor, dict[str, Tensor], Any]:
    """One guided forward and backward: loss, gradients, report."""
    sequences, records = batch
    micro_batch = lib.packed(records, sequences, compare=True)
    loss = lib.loss_of(lib.packed_logits(model, sequences, micro_batch), sequences)
    loss.backward()
    return loss.detach(), lib.gradients(model), micro_batch.report()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("recompute", [FULL_RECOMPUTE, SELECTIVE_RECOMPUTE])
def test_recomputation_changes_no_bit_and_counts_nothing_twice(
    lib: Any, build_fp4: Callable[..., Any], batches: Any, recompute: dict[str, Any]
) -> None:
    loss, grads, report = step(lib, build_fp4(), batches[0])
    loss_again, grads_again, report_again = step(lib, build_fp4(**recompute), batches[0])
    assert torch.equal(loss, loss_again)
    assert_same(grads, grads_again)
    assert report == report_again


def test_every_recomputation_follows_the_micro_batch_of_its_own_forward(
    lib: Any, build_fp4: Callable[..., Any], batches: Any
) -> None:
    """As on a pipeline's first stage: both forwards run before the first backward."""
    model = build_fp4(**FULL_RECOMPUTE)
    alone = [step(lib, model, batch)[1] for batch in batches]
    losses = []
    for sequences, records in batches:
        out = lib.packed_logits(model, sequences, lib.packed(records, sequences))
        losses.append(lib.loss_of(out, sequences))
    for loss, expected in zip(losses, alone, strict=True):
        loss.backward()
        assert_same(lib.gradients(model), expected)


def test_an_unguided_forward_stays_unguided_when_it_is_recomputed_under_guidance(
    lib: Any, build_fp4: Callable[..., Any], batches: Any
) -> None:
    from megatron_trace import guide
    from megatron_trace.records.coverage import NothingGuided

    model = build_fp4(**FULL_RECOMPUTE)
    sequences, records = batches[0]
    lib.loss_of(lib.packed_logits(model, sequences, None), sequences).backward()
    expected = lib.gradients(model)
    loss = lib.loss_of(lib.packed_logits(model, sequences, None), sequences)
    # A block without a forward is an error at its end; the backward has run by then.
    with pytest.raises(NothingGuided), guide(lib.packed(records, sequences)):
        loss.backward()
    assert_same(lib.gradients(model), expected)


def test_every_parameter_gets_a_gradient_through_the_rounding(
    lib: Any, build_fp4: Callable[..., Any], batches: Any
) -> None:
    model = build_fp4()
    _, grads, _ = step(lib, model, batches[1])
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all(grad.isfinite().all() for grad in grads.values())
    router = grads["decoder.layers.3.mlp.router.weight"]
    assert router.abs().max() > 0


def test_the_gradient_passes_straight_through_a_guided_site(lib: Any, batches: Any) -> None:
    sequences, records = batches[0]
    rows = lib.packed(records, sequences).site_rows(Site.FC1, 1, slice(None), counting=False)
    values = torch.randn(len(rows.state), SHAPE.hidden_size, requires_grad=True)
    rounded = round_rows(values, token_scale(values.detach()), rows)
    assert not torch.equal(rounded, values)
    upstream = torch.randn_like(rounded)
    rounded.backward(upstream)
    assert values.grad is not None
    assert torch.equal(values.grad, upstream)


def test_the_weights_gradient_is_that_of_the_rounded_weight(
    lib: Any, build_fp4: Callable[..., Any], build: Callable[..., Any], batches: Any
) -> None:
    """With weights that FP4 holds exactly, rounding them changes neither loss nor gradient."""
    from megatron_trace import TraceTrainerConfig, disable_fp4, enable_fp4

    model = build()
    enable_fp4(model, TraceTrainerConfig(weight_dtype=torch.float32))
    with torch.no_grad():
        for layer in model.decoder.layers:
            for expert in layer.mlp.experts.local_experts:
                for linear in (expert.linear_fc1, expert.linear_fc2):
                    linear.weight.copy_(linear.trace_weight.round_weight(linear.weight))
    loss, grads, _ = step(lib, model, batches[0])
    for layer in model.decoder.layers:
        for expert in layer.mlp.experts.local_experts:
            del expert.linear_fc1.trace_weight, expert.linear_fc2.trace_weight
    loss_unrounded, grads_unrounded, _ = step(lib, model, batches[0])
    assert torch.equal(loss, loss_unrounded)
    assert_same(grads, grads_unrounded)
    disable_fp4(model)


def test_disabling_fp4_restores_the_models_own_numbers(
    lib: Any, build: Callable[..., Any], batches: Any
) -> None:
    from megatron_trace import disable_fp4, enable_fp4

    model = build()
    sequences = batches[0][0]
    before = lib.packed_logits(model, sequences, None)
    enable_fp4(model)
    rounded = lib.packed_logits(model, sequences, None)
    disable_fp4(model)
    after = lib.packed_logits(model, sequences, None)
    assert torch.equal(before, after)
    assert not torch.equal(before, rounded)


def test_weighing_after_fc2_is_what_megatron_computes(
    lib: Any,
    build: Callable[..., Any],
    batches: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without rounding, probabilities before and after fc2 differ by float32 rounding alone."""
    from megatron_trace import TraceTrainerConfig, enable_fp4

    model = build()
    sequences = batches[1][0]
    before = lib.packed_logits(model, sequences, None)
    enable_fp4(model, TraceTrainerConfig(kv_cache=False))
    monkeypatch.setattr(
        "megatron_trace.layers.experts.round_rows", lambda values, scale, rows, first=0: values
    )
    unrounded = "megatron_trace.layers.weights.ExpertWeight.round_weight"
    monkeypatch.setattr(unrounded, lambda self, weight, alone: weight)
    after = lib.packed_logits(model, sequences, None)
    assert not torch.equal(before, after)
    assert (before - after).abs().max() < 1e-5
