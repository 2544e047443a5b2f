"""Routing replay from the recorded expert ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_rollout import SHAPE, Weights
from torch import Tensor

from bridge.layout import Site

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(8, 5)


@pytest.fixture(scope="module")
def forged(lib: Any, weights: Weights, sequences: list[Tensor]) -> list[Any]:
    """Records whose expert ids the trainer's router would not choose."""
    generator = torch.Generator().manual_seed(3)
    records = []
    for record in lib.roll_out(weights, sequences)[0]:
        forward = record.forward.clone()
        for layer in SHAPE.moe_layers:
            scores = torch.rand(len(forward), SHAPE.num_experts, generator=generator)
            record.layout.write_routes(forward, layer, scores.topk(SHAPE.top_k)[1])
        records.append(replace(record, forward=forward))
    return records


def routed(lib: Any, model: Any, sequences: Any, micro_batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Layer 0's router input [T, H], probabilities and map [T, E] of one forward."""
    seen: dict[str, Any] = {}
    router = model.decoder.layers[0].mlp.router
    handle = router.register_forward_hook(
        lambda module, inputs, output: seen.update(hidden=inputs[0], output=output)
    )
    lib.packed_logits(model, sequences, micro_batch)
    handle.remove()
    return seen["hidden"].squeeze(1), *seen["output"]


def test_recorded_experts_replace_the_routers_choice_with_its_own_probabilities(
    lib: Any, build_fp4: Callable[..., Any], sequences: list[Tensor], forged: list[Any]
) -> None:
    model = build_fp4()
    micro_batch = lib.packed(forged, sequences, sites=(Site.ROUTES,))
    hidden, probs, chosen = routed(lib, model, sequences, micro_batch)
    known = lib.consumed(sequences)
    ids = torch.cat([record.layout.routes(record.forward)[:, 0] for record in forged])
    expected_map = torch.zeros_like(chosen).scatter(1, ids, True)
    assert torch.equal(chosen[known], expected_map[known])

    scores = (hidden @ model.decoder.layers[0].mlp.router.weight.T).softmax(-1)
    kept = scores * expected_map
    expected = kept / kept.sum(-1, keepdim=True)
    torch.testing.assert_close(probs[known], expected[known])

    (probs[known] ** 2).sum().backward()
    assert model.decoder.layers[0].mlp.router.weight.grad.abs().max() > 0


def test_unrecorded_tokens_keep_the_routers_choice(
    lib: Any, build_fp4: Callable[..., Any], sequences: list[Tensor], forged: list[Any]
) -> None:
    model = build_fp4()
    _, own_probs, own_map = routed(lib, model, sequences, None)
    micro_batch = lib.packed(forged, sequences)
    _, probs, chosen = routed(lib, model, sequences, micro_batch)
    unknown = ~lib.consumed(sequences)
    assert torch.equal(chosen[unknown], own_map[unknown])
    torch.testing.assert_close(probs[unknown], own_probs[unknown])
    assert not torch.equal(chosen, own_map)


def test_routes_that_are_recorded_but_not_chosen_are_not_replayed(
    lib: Any, build_fp4: Callable[..., Any], sequences: list[Tensor], forged: list[Any]
) -> None:
    model = build_fp4()
    _, _, own_map = routed(lib, model, sequences, None)
    micro_batch = lib.packed(forged, sequences, sites=(Site.FC2,), on_missing="round_to_nearest")
    _, _, chosen = routed(lib, model, sequences, micro_batch)
    assert torch.equal(chosen, own_map)
    # fc2 slots of experts that the trainer did not choose have no use, the others no record.
    report = micro_batch.report()
    total = report.total([Site.FC2])
    slots = int(lib.consumed(sequences).sum()) * SHAPE.top_k * SHAPE.num_layers
    assert total.guided + total.missing == slots * SHAPE.moe_intermediate_size
    assert total.missing > 0


def test_the_report_says_how_often_the_trainers_router_agrees(
    lib: Any, build_fp4: Callable[..., Any], sequences: list[Tensor], forged: list[Any]
) -> None:
    micro_batch = lib.packed(forged, sequences)
    lib.packed_logits(build_fp4(), sequences, micro_batch)
    count = micro_batch.report().total([Site.ROUTES])
    assert count.agreement_used == 1.0
    assert 0 < count.agreement_nearest < 0.6
