"""Rounded weights are one copy that all forwards share, and never those of other weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch
from reference_rollout import Weights, random_weights
from torch import Tensor

from megatron_trace import TraceTrainerConfig, enable_fp4, free_rounded_weights

pytestmark = pytest.mark.usefixtures("one_rank")

JOB = Path(__file__).parents[1] / "jobs" / "shared_weight.py"
OTHER_WEIGHTS = random_weights(seed=1)
USED_EXPERT = 5  # by the first sequence, in layer 1


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(9, 6)


@pytest.fixture(scope="module")
def records(lib: Any, weights: Weights, sequences: list[Tensor]) -> list[Any]:
    records = lib.roll_out(weights, sequences, noise=0.02)[0]
    routes_TLK = lib.FULL_LAYOUT.routes(records[0].forward)
    assert USED_EXPERT in routes_TLK[:-1, 1]
    return records


def expert_weights(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


def an_expert(model: Any) -> Tensor:
    """Return fc1 of an expert that the records send tokens to."""
    return model.decoder.layers[1].mlp.experts.local_experts[USED_EXPERT].linear_fc1.weight


def expert_bytes(model: Any) -> int:
    return sum(p.nbytes for p in expert_weights(model).values())


@contextmanager
def saved_for_backward(model: Any) -> Iterator[dict[int, int]]:
    """Collect the bytes of what is saved in the shape of an expert's weight, by storage."""
    parameters = {p.data_ptr() for p in model.parameters()}
    shapes = {p.shape for p in expert_weights(model).values()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape in shapes and tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


@contextmanager
def counted_roundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    from megatron_trace.layers.weights import ExpertWeight

    calls: list[Any] = []
    original = ExpertWeight._rounded

    def counted(self: ExpertWeight, weight: Tensor) -> Tensor:
        calls.append(weight.shape)
        return original(self, weight)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertWeight, "_rounded", counted)
        yield calls


def test_all_forwards_in_flight_share_one_copy(
    lib: Any, build_fp4: Callable[..., Any], sequences: Any, records: Any
) -> None:
    model = build_fp4()
    with saved_for_backward(model) as saved:
        in_flight = [
            lib.packed_logits(model, sequences, lib.packed(records, sequences)) for _ in range(3)
        ]
    assert len(in_flight) == 3
    assert sum(saved.values()) == expert_bytes(model)
    assert free_rounded_weights(model) == expert_bytes(model)
    assert free_rounded_weights(model) == 0


def test_a_weight_is_rounded_once_an_optimizer_step(
    lib: Any,
    build_fp4: Callable[..., Any],
    sequences: Any,
    records: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_fp4()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with counted_roundings(monkeypatch) as calls:
        for steps in (1, 2):
            for _ in range(2):
                out = lib.packed_logits(model, sequences, lib.packed(records, sequences))
                lib.loss_of(out, sequences).backward()
            optimizer.step()
            assert free_rounded_weights(model) == 0, "the step has freed them"
            assert len(calls) == steps * len(expert_weights(model))


# --- whatever changes the weights, the next forward rounds the new ones


def _add(model: Any) -> None:
    with torch.no_grad():
        an_expert(model).mul_(1.5)


def _one_bit(model: Any) -> None:
    an_expert(model).data.view(torch.int32)[0, 0] ^= 1 << 23


def _behind_torchs_back(model: Any) -> None:
    an_expert(model).data.copy_(OTHER_WEIGHTS["model.layers.0.mlp.experts.0.gate_proj.weight"][:1])


def _through_numpy(model: Any) -> None:
    an_expert(model).detach().numpy()[:] *= 2


def _another_storage(model: Any) -> None:
    an_expert(model).data = an_expert(model).data * 1.5


def _exchange_rows(model: Any) -> None:
    an_expert(model).data[:2] = an_expert(model).data[:2].flip(0)


def _exchange_experts(model: Any) -> None:
    one, other = (
        model.decoder.layers[0].mlp.experts.local_experts[i].linear_fc2.weight for i in (0, 1)
    )
    one.data, other.data = other.data, one.data


def _load_state_dict(model: Any) -> None:
    model.load_state_dict({n: 1.25 * t for n, t in model.state_dict().items() if t is not None})


def _load_checkpoint(model: Any) -> None:
    from megatron_trace.hf import load_hf

    load_hf(model, OTHER_WEIGHTS)


def _flat_buffer(model: Any) -> None:
    """As a parameter gather does: the parameter becomes a view, and the buffer is written."""
    weight = an_expert(model)
    flat = torch.zeros(1 + weight.numel())
    weight.data = flat[1:].view_as(weight)
    flat.fill_(0.5)


def _step(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    model.zero_grad(set_to_none=True)


CHANGES = (
    _add,
    _one_bit,
    _behind_torchs_back,
    _through_numpy,
    _another_storage,
    _exchange_rows,
    _exchange_experts,
    _load_state_dict,
    _load_checkpoint,
    _flat_buffer,
    _step,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_changed_weight_is_rounded_anew(
    lib: Any,
    build_fp4: Callable[..., Any],
    sequences: Any,
    records: Any,
    change: Callable[[Any], None],
) -> None:
    model = build_fp4()
    micro_batch = lib.packed(records, sequences)
    before = lib.packed_logits(model, sequences, micro_batch)
    change(model)
    after = lib.packed_logits(model, sequences, micro_batch)
    fresh = build_fp4()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, lib.packed_logits(fresh, sequences, micro_batch))
    assert not torch.equal(after, before)


def test_a_forward_in_flight_keeps_its_weights_while_others_take_their_place(
    lib: Any, build_fp4: Callable[..., Any], sequences: Any, records: Any
) -> None:
    """As where a reference model's weights are put into the trained one for a forward."""
    model = build_fp4()
    micro_batch = lib.packed(records, sequences)
    lib.loss_of(lib.packed_logits(model, sequences, micro_batch), sequences).backward()
    expected = lib.gradients(model)

    loss = lib.loss_of(lib.packed_logits(model, sequences, micro_batch), sequences)
    own = {name: p.detach().clone() for name, p in expert_weights(model).items()}
    for parameter in expert_weights(model).values():
        parameter.data.mul_(3)
    lib.packed_logits(model, sequences, micro_batch)
    for name, parameter in expert_weights(model).items():
        parameter.data.copy_(own[name])
    loss.backward()
    ours = lib.gradients(model)
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []


def test_weights_rounded_in_inference_mode_serve_a_training_forward(
    lib: Any, build_fp4: Callable[..., Any], sequences: Any, records: Any
) -> None:
    model, fresh = build_fp4(), build_fp4()
    micro_batch = lib.packed(records, sequences)
    with torch.inference_mode():
        lib.packed_logits(model, sequences, micro_batch)
    lib.loss_of(lib.packed_logits(model, sequences, micro_batch), sequences).backward()
    lib.loss_of(lib.packed_logits(fresh, sequences, micro_batch), sequences).backward()
    ours, theirs = lib.gradients(model), lib.gradients(fresh)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_copy_of_a_rounded_weight_rounds_its_own(build_fp4: Callable[..., Any]) -> None:
    from megatron_trace.layers.weights import ExpertWeight
    from megatron_trace.rounding.expert_group import ExpertGroup

    weight = an_expert(build_fp4()).detach()
    rounding = ExpertWeight(ExpertGroup([weight], 2, torch.float32, None), 0)
    rounding.round_weight(weight)
    twin = copy.deepcopy(rounding)
    assert torch.equal(twin.round_weight(2 * weight), 2 * rounding.round_weight(weight))
    assert twin.kept.free() == rounding.kept.free() == weight.nbytes


def test_what_the_copies_take_is_logged(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with caplog.at_level(logging.INFO, "megatron_trace"):
        enable_fp4(model, TraceTrainerConfig(weight_dtype=torch.float32))
    assert f"take {expert_bytes(model) / 2**30:.3f} GiB" in caplog.text


@pytest.mark.server
def test_ranks_that_share_a_weight_round_it_anew_together() -> None:
    """A change in one rank's part alone changes no other rank's bits, but its tensor scale."""
    job = launch("--nproc-per-node", "2", str(JOB))
    assert job.returncode == 0, job.stderr[-4000:]


def test_a_layer_with_a_hook_before_it_reads_no_other_experts_weight(
    build_fp4: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's overlapped parameter gather ends there, so later experts may not be there yet."""
    from megatron_trace.hooks import expert_weight
    from megatron_trace.rounding.expert_group import ExpertGroup

    linear = build_fp4().decoder.layers[0].mlp.experts.local_experts[0].linear_fc1
    alone = expert_weight(linear, linear.weight)
    group = torch.full((8, *linear.weight.shape), 3.0)
    monkeypatch.setattr(ExpertGroup, "takes", lambda self, weight, index: True)
    monkeypatch.setattr(ExpertGroup, "rounded", lambda self: group)
    assert torch.equal(expert_weight(linear, linear.weight), group[0])
    linear.register_forward_pre_hook(lambda module, args: None)
    assert torch.equal(expert_weight(linear, linear.weight), alone)
