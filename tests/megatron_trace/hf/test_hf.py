"""Hugging Face checkpoints in and out of Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference_rollout import HF_CONFIG, SHAPE, Weights
from safetensors.torch import save_file

from bridge.errors import LayoutError
from bridge.fp4.digest import digest
from bridge.fp4.nvfp4 import quantize_weight

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    """transformers without torchvision, whose CUDA build cannot be imported beside a CPU torch."""
    import transformers
    from transformers.utils import import_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.utils, "is_torchvision_available", lambda: False)
        patch.setattr(import_utils, "is_torchvision_available", lambda: False)
        yield transformers


@pytest.fixture(scope="module")
def checkpoint(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A transformers model and the directory it saved itself to."""
    config = transformers.Qwen3MoeConfig(
        **{k: v for k, v in HF_CONFIG.items() if k not in ("model_type", "rope_theta")},
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
        attn_implementation="eager",
    )
    torch.manual_seed(7)
    model = transformers.Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the initial ones and near-zero logits, so that every weight matters.
            parameter.copy_(
                1 + 0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 5 * parameter
            )
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    return model, directory


def load(directory: Path, **overrides: Any) -> Any:
    from megatron_trace.hf import build_model, load_hf, transformer_config
    from megatron_trace.hf.qwen3_moe import read_hf_config

    hf = read_hf_config(directory)
    model = build_model(hf, transformer_config(hf, **overrides))
    load_hf(model, directory)
    return model


def test_logits_equal_transformers_to_1e_5(lib: Any, checkpoint: tuple[Any, Path]) -> None:
    reference, directory = checkpoint
    model = load(directory)
    sequences = lib.random_sequences(11, 17, 4)
    with torch.no_grad():
        expected = torch.cat([reference(tokens[None]).logits[0] for tokens in sequences])
        packed = lib.packed_logits(model, sequences, None)
        padded = lib.padded_logits(model, sequences, None)
    assert expected.std() > 0.5
    assert (packed - expected).abs().max() <= 1e-5
    assert (padded - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_gives_back_every_loaded_tensor(
    checkpoint: tuple[Any, Path], dtype: torch.dtype
) -> None:
    from safetensors.torch import load_file

    from megatron_trace.hf import export_hf

    _, directory = checkpoint
    exported = dict(export_hf(load(directory, params_dtype=dtype)))
    saved = load_file(directory / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name].to(dtype)) for name in saved)


def test_a_tied_output_layer_is_loaded_and_exported_once(weights: Weights, tmp_path: Path) -> None:
    from megatron_trace.hf import build_model, export_hf, load_hf, transformer_config

    tied = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    save_file(tied, tmp_path / "model.safetensors")
    hf = HF_CONFIG | {"tie_word_embeddings": True}
    model = build_model(hf, transformer_config(hf))
    load_hf(model, tmp_path)
    assert dict(export_hf(model)).keys() == tied.keys()


def test_digests_are_those_of_the_rollouts_quantized_weights(
    build: Callable[..., Any], weights: Weights
) -> None:
    from megatron_trace.hf import weight_digests

    expected = {
        name: digest(quantize_weight(tensor.to(torch.bfloat16)))
        for name, tensor in weights.items()
        if ".mlp.experts." in name
    }
    assert len(expected) == SHAPE.num_layers * SHAPE.num_experts * 3
    assert weight_digests(build()) == expected
    assert weight_digests(build(params_dtype=torch.bfloat16)) == expected


def test_weights_that_differ_from_the_rollouts_are_named(build: Callable[..., Any]) -> None:
    from megatron_trace.hf import require_equal_weights, weight_digests
    from megatron_trace.hf.digests import WeightsDiffer

    model = build()
    reported = weight_digests(model)
    client: Any = SimpleNamespace(digests=lambda version: reported if version == "7" else {})
    require_equal_weights(model, client, "7")
    with pytest.raises(WeightsDiffer, match=r"96 of 96 expert matrices .* version '8'"):
        require_equal_weights(model, client, "8")
    with torch.no_grad():
        model.decoder.layers[2].mlp.experts.local_experts[4].linear_fc2.weight[0, 0] += 1
    with pytest.raises(WeightsDiffer, match=r"1 of 96 .*model.layers.2.mlp.experts.4.down_proj"):
        require_equal_weights(model, client, "7")


def test_the_forward_computes_with_the_weights_that_the_digests_name(
    build_fp4: Callable[..., Any], weights: Weights
) -> None:
    from megatron_trace.hf import load_hf

    model = build_fp4()
    prefix = "model.layers.1.mlp.experts.5."
    # So small that its block scales would vanish under the tensor scale of the up projection.
    tiny = 2.0**-16 * weights[f"{prefix}gate_proj.weight"]
    weights = weights | {f"{prefix}gate_proj.weight": tiny}
    load_hf(model, weights)
    expert = model.decoder.layers[1].mlp.experts.local_experts[5]
    gate, up, down = (
        quantize_weight(weights[f"{prefix}{name}_proj.weight"]).dequantize()
        for name in ("gate", "up", "down")
    )
    fc1, fc2 = expert.linear_fc1, expert.linear_fc2
    assert torch.equal(fc1.trace_weight.round_weight(fc1.weight), torch.cat((gate, up)))
    assert torch.equal(fc2.trace_weight.round_weight(fc2.weight), down)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"mlp_only_layers": [1]}, "some layers are dense"),
        ({"attention_bias": True}, "attention has biases"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions are scaled"),
    ],
)
def test_other_architectures_are_refused(change: dict[str, Any], sentence: str) -> None:
    from megatron_trace.hf import transformer_config
    from megatron_trace.hf.qwen3_moe import UnsupportedCheckpoint

    with pytest.raises(UnsupportedCheckpoint, match=sentence):
        transformer_config(HF_CONFIG | change)


def test_an_incomplete_checkpoint_is_refused(
    build: Callable[..., Any], weights: Weights, tmp_path: Path
) -> None:
    from megatron_trace.hf import load_hf
    from megatron_trace.hf.load import CheckpointMismatch

    model = build()
    some = dict(weights)
    del some["model.layers.2.mlp.experts.3.up_proj.weight"]
    with pytest.raises(CheckpointMismatch, match=r"experts\.3\.up_proj"):
        load_hf(model, some)
    with pytest.raises(CheckpointMismatch, match=r"no \*\.safetensors file"):
        load_hf(model, tmp_path)
    some = weights | {"lm_head.weight": torch.zeros(7, SHAPE.hidden_size)}
    with pytest.raises(CheckpointMismatch, match="build the model from this checkpoint"):
        load_hf(model, some)


def test_a_size_that_fp4_blocks_do_not_divide_is_refused(one_rank: None) -> None:
    from megatron_trace import enable_fp4
    from megatron_trace.hf import build_model, transformer_config

    hf = HF_CONFIG | {"moe_intermediate_size": 24}
    with pytest.raises(LayoutError, match="moe_intermediate_size is 24"):
        enable_fp4(build_model(hf, transformer_config(hf)))
