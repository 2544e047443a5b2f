"""Guided training steps through Transformer Engine's layers, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference_rollout import HF_CONFIG, Weights
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MOE_ACT = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
FUSED = {"moe_permute_fusion": True, "moe_router_fusion": True, "bias_activation_fusion": True}
SHARED = {"moe_shared_expert_intermediate_size": 32}
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    pytest.importorskip("transformer_engine", reason="needs Transformer Engine")
    import micro_batches

    return micro_batches


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two runs of a step give the same bits."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def build(lib: Any, weights: Weights) -> Build:
    """Build the tiny model of Transformer Engine's layers in BF16, with FP4 on."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_trace import enable_fp4
    from megatron_trace.hf import build_model, load_hf, transformer_config

    def make(**overrides: Any) -> Any:
        settings = {"params_dtype": torch.bfloat16, "moe_grouped_gemm": True} | overrides
        config = transformer_config(HF_CONFIG, **settings)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        model = build_model(HF_CONFIG, config, spec=spec)
        shared = {name: p for name, p in model.named_parameters() if ".shared_experts." in name}
        if not shared:
            load_hf(model, weights)
        else:
            generator = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
        model = model.cuda()
        enable_fp4(model)
        return model

    return make


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(24, 32, seed=3)


@pytest.fixture(scope="module")
def records(lib: Any, weights: Weights, sequences: list[Tensor]) -> Any:
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    return lib.roll_out(rounded, sequences)[0]


def step(lib: Any, model: Any, sequences: Any, records: Any) -> tuple[Tensor, Any]:
    """One guided forward and backward of right-padded sequences: logits and report."""
    from megatron_trace import Guidance, GuidedMicroBatch, guide

    tokens = lib.pad(sequences)
    micro_batch = None
    if records is not None:
        micro_batch = GuidedMicroBatch.from_records(
            records,
            tokens,
            lengths=list(map(len, sequences)),
            weight_version="1",
            guidance=Guidance(compare=True),
            device="cuda",
        )
    positions = torch.arange(tokens.shape[1], device="cuda").expand_as(tokens)
    with guide(micro_batch):
        logits = model(tokens.cuda(), positions, None)
    known = torch.zeros(tokens.shape, device="cuda")
    for row, tokens_of in zip(known, sequences, strict=True):
        row[: len(tokens_of) - 1] = 1
    (logits.float().logsumexp(-1) * known).sum().backward()
    return logits.detach(), None if micro_batch is None else micro_batch.report()


def agreement(report: Any, site: Any) -> float:
    counts = [count for (where, _), count in report.counts.items() if where is site]
    return sum(count.agree_used for count in counts) / sum(count.compared for count in counts)


@pytest.mark.parametrize("settings", [{}, FUSED, FULL_RECOMPUTE, MOE_ACT, FUSED | FULL_RECOMPUTE])
def test_a_guided_step_follows_the_rollout_at_every_site(
    lib: Any, build: Build, sequences: Any, records: Any, settings: dict[str, Any]
) -> None:
    from bridge.layout import Site

    model = build(**settings)
    _, report = step(lib, model, sequences, records)
    assert report.total().missing == 0
    for site in (Site.FC1, Site.FC2, Site.K, Site.V):
        assert agreement(report, site) > 0.98, site
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("settings", [{}, FULL_RECOMPUTE])
def test_shared_buffers_give_every_layer_its_own_weights_in_the_backward(
    lib: Any,
    build: Build,
    sequences: Any,
    records: Any,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a copy of every layer's rounded weights, made by the reference."""
    from megatron_trace.rounding.expert_group import ExpertGroup

    model = build(**settings)
    logits, report = step(lib, model, sequences, records)
    grads = lib.gradients(model)
    monkeypatch.setattr(ExpertGroup, "takes", lambda self, weight, index: False)
    expected, expected_report = step(lib, model, sequences, records)
    expected_grads = lib.gradients(model)
    assert torch.equal(logits, expected)
    assert report == expected_report
    assert [n for n, g in expected_grads.items() if not torch.equal(grads[n], g)] == []


def test_a_backward_after_another_forward_multiplies_with_its_own_weights(
    lib: Any, build: Build, sequences: Any
) -> None:
    """As in a pipeline: two forwards, then two backwards, and one shared buffer."""
    model = build()
    tokens = lib.pad(sequences).cuda()
    positions = torch.arange(tokens.shape[1], device="cuda").expand_as(tokens)

    def loss(which: int) -> Tensor:
        row = slice(which, which + 1)
        return model(tokens[row], positions[row], None).float().logsumexp(-1).sum()

    alone = []
    for which in (0, 1):
        loss(which).backward()
        alone.append(lib.gradients(model))
    both = [loss(0), loss(1)]
    for value, expected in zip(both, alone, strict=True):
        value.backward()
        grads = lib.gradients(model)
        assert [name for name in expected if not torch.equal(grads[name], expected[name])] == []


def test_fused_gradients_reach_the_parameters_main_grad(
    lib: Any, build: Build, sequences: Any, records: Any
) -> None:
    from megatron_trace import enable_fp4

    model = build()
    step(lib, model, sequences, records)
    expected = lib.gradients(model)
    for layer in model.decoder.layers:
        for linear in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
            linear.fuse_wgrad_accumulation = True
    enable_fp4(model)
    fused = {name: p for name, p in model.named_parameters() if ".experts." in name}
    for parameter in fused.values():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    step(lib, model, sequences, records)
    for name, parameter in fused.items():
        assert parameter.grad_added_to_main_grad
        largest = expected[name].abs().max()
        assert (parameter.main_grad - expected[name]).abs().max() <= 0.01 * largest, name


def test_overlapped_shared_experts_read_the_unrounded_input(
    lib: Any, build: Build, sequences: Any
) -> None:
    plain, _ = step(lib, build(**SHARED), sequences, None)
    overlapped, _ = step(lib, build(**SHARED, moe_shared_expert_overlap=True), sequences, None)
    assert torch.equal(plain, overlapped)
