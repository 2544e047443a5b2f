"""Checkpoints, compilers and offloading that are not Megatron's: followed rightly, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from reference_rollout import Weights
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_trace import bind_micro_batch, context, guide
from megatron_trace.context import UnboundRecomputation

pytestmark = pytest.mark.usefixtures("one_rank")

Layer = Callable[..., Any]


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def batches(lib: Any, weights: Weights) -> list[tuple[Any, Any]]:
    """Two micro-batches of the same form, with other tokens and other records."""
    made = []
    for seed in (1, 2):
        sequences = lib.random_sequences(7, 5, seed=seed)
        made.append((sequences, lib.roll_out(weights, sequences, noise=0.02)[0]))
    return made


class Recomputing(torch.autograd.Function):
    """A checkpoint as anybody may write it: forward without a graph, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], hidden: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return function(hidden)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(hidden)[0]
        torch.autograd.backward(out, grad)
        return None, hidden.grad


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": lambda f, h: checkpoint(f, h, use_reentrant=True),
    "non-reentrant": lambda f, h: checkpoint(f, h, use_reentrant=False),
    "somebody's own": lambda f, h: (Recomputing.apply(f, h), None),
}


def recompute_layers(model: Any, run: Callable[..., Any], bind: bool) -> Any:
    """Put every layer's forward under a checkpoint."""
    for layer in model.decoder.layers:
        forward = layer.forward

        def again(hidden_states: Tensor, *a: Any, _f: Layer = forward, **k: Any) -> Any:
            def call(hidden: Tensor) -> Any:
                return _f(hidden, *a, **k)

            return run(bind_micro_batch(call) if bind else call, hidden_states)

        layer.forward = again
    return model


def loss_of(
    lib: Any, model: Any, batch: tuple[Any, Any], guided: bool = True
) -> tuple[Tensor, Any]:
    sequences, records = batch
    micro_batch = lib.packed(records, sequences, compare=True) if guided else None
    return lib.loss_of(lib.packed_logits(model, sequences, micro_batch), sequences), micro_batch


def gradients_of(
    lib: Any, model: Any, batch: tuple[Any, Any], guided: bool = True
) -> tuple[dict[str, Tensor], Any]:
    loss, micro_batch = loss_of(lib, model, batch, guided)
    loss.backward()
    return lib.gradients(model), micro_batch and micro_batch.report()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("where", ["outside guide", "in another guide", "in its own guide"])
def test_an_unbound_checkpoint_is_refused_in_the_backward(
    lib: Any, build_fp4: Callable[..., Any], batches: Any, kind: str, where: str
) -> None:
    model = recompute_layers(build_fp4(), CHECKPOINTS[kind], bind=False)
    loss, micro_batch = loss_of(lib, model, batches[0])
    other = lib.packed(batches[1][1], batches[1][0])
    inside = {"outside guide": None, "in another guide": other, "in its own guide": micro_batch}
    scope = guide(inside[where]) if inside[where] else nullcontext()
    with pytest.raises(UnboundRecomputation, match=r"bind_micro_batch\(function\)") as error, scope:
        loss.backward()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_bound_checkpoint_follows_its_own_micro_batch_and_counts_once(
    lib: Any, build_fp4: Callable[..., Any], batches: Any, kind: str
) -> None:
    """As on a pipeline's first stage: both forwards run before the first backward."""
    plain = build_fp4()
    expected = [gradients_of(lib, plain, batch) for batch in batches]
    model = recompute_layers(build_fp4(), CHECKPOINTS[kind], bind=True)
    in_flight = [loss_of(lib, model, batch) for batch in batches]
    for (loss, micro_batch), (grads, report) in zip(in_flight, expected, strict=True):
        loss.backward()
        assert_same(lib.gradients(model), grads)
        assert micro_batch.report() == report


def test_a_function_bound_once_for_all_micro_batches_is_refused(
    lib: Any, build_fp4: Callable[..., Any], batches: Any
) -> None:
    model = build_fp4()
    layer = model.decoder.layers[1]
    layer.forward = bind_micro_batch(layer.forward)  # outside guide(), so to no micro-batch
    with pytest.raises(UnboundRecomputation, match="anew in every forward"):
        loss_of(lib, model, batches[0])


def test_a_process_that_never_guides_may_recompute_as_it_likes(
    lib: Any, build_fp4: Callable[..., Any], batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = gradients_of(lib, build_fp4(), batches[0], guided=False)
    monkeypatch.setattr(context, "_guided_before", False)
    model = recompute_layers(build_fp4(), CHECKPOINTS["reentrant"], bind=False)
    ours, _ = gradients_of(lib, model, batches[0], guided=False)
    assert_same(ours, expected)


def test_a_recomputation_may_name_its_micro_batch_itself(
    lib: Any, build_fp4: Callable[..., Any], batches: Any
) -> None:
    sequences, records = batches[0]
    expected, _ = gradients_of(lib, build_fp4(), batches[0])
    model = build_fp4()
    layer = model.decoder.layers[2]
    forward = layer.forward

    def again(hidden_states: Tensor, *a: Any, **k: Any) -> Any:
        def call(hidden: Tensor) -> Any:
            with guide(lib.packed(records, sequences)):
                return layer_call(hidden, *a, **k)

        return Recomputing.apply(call, hidden_states), None

    def layer_call(*a: Any, **k: Any) -> Any:
        layer.forward = forward
        try:
            return layer(*a, **k)
        finally:
            layer.forward = again

    layer.forward = again
    ours, _ = gradients_of(lib, model, batches[0])
    assert_same(ours, expected)


def test_activations_that_are_offloaded_come_back_as_they_were(
    lib: Any, build_fp4: Callable[..., Any], batches: Any
) -> None:
    model = build_fp4()
    expected = [gradients_of(lib, model, batch) for batch in batches]
    for batch, (grads, report) in zip(batches, expected, strict=True):
        with torch.autograd.graph.save_on_cpu():
            ours, our_report = gradients_of(lib, model, batch)
        assert_same(ours, grads)
        assert our_report == report


@pytest.mark.parametrize("part", ["layers", "model"])
def test_a_compiled_model_follows_every_micro_batchs_own_records(
    lib: Any, build_fp4: Callable[..., Any], batches: Any, part: str
) -> None:
    """The all-gather dispatcher: the compiler takes no stand-in for a CUDA stream."""
    model = build_fp4(moe_token_dispatcher_type="allgather")
    expected = [gradients_of(lib, model, batch) for batch in batches]
    torch.compiler.reset()
    if part == "model":
        model.compile(backend="eager")
    else:
        for layer in model.decoder.layers:
            layer.compile(backend="eager")
    for batch, (grads, report) in zip(batches, expected, strict=True):
        ours, our_report = gradients_of(lib, model, batch)
        assert_same(ours, grads)
        assert our_report == report
    torch.compiler.reset()
