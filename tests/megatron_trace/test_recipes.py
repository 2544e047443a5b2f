"""Models with the settings of public recipes are accepted.

The values are those of the named scripts. The kernels of Transformer Engine, Apex and DeepEP are
absent here, so settings that ask for them are set once the model is built: `enable_fp4` reads the
same configuration either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_rank")

# slime, scripts/run-qwen3-30B-A3B.sh with scripts/models/qwen3-30B-A3B.sh
SLIME = {
    "tensor_model_parallel_size": 4,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "attention_softmax_in_fp32": True,
    "moe_router_score_function": "softmax",
    "moe_token_dispatcher_type": "alltoall",
    "moe_token_drop_policy": "probs",
    "moe_router_dtype": "fp32",
    "moe_permute_fusion": True,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "aux_loss",  # Megatron's default
    "gradient_accumulation_fusion": True,  # Megatron's default
}
# verl, examples/grpo_trainer/run_qwen3moe-30b_megatron_96gb.sh
VERL = {
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "apply_rope_fusion": True,
    "masked_softmax_fusion": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "gradient_accumulation_fusion": True,
    "deallocate_pipeline_outputs": True,
    "persist_layer_norm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "flex",
    "moe_router_dtype": "fp32",
    "moe_enable_deepep": True,
}
# verl, examples/grpo_trainer/run_qwen3_vl-30b-megatron.sh, its language model
VERL_CONTEXT = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "gradient_accumulation_fusion": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "flex",
    "moe_enable_deepep": True,
    "moe_router_dtype": "fp32",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
}
# The model of all three, with one layer and a small vocabulary.
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
}


@pytest.fixture(scope="module")
def model(one_rank: None) -> Any:
    from grouped_linear import grouped_experts

    from megatron_trace.hf import build_model, transformer_config

    config = transformer_config(QWEN3_30B_A3B, params_dtype=torch.bfloat16, moe_grouped_gemm=True)
    with grouped_experts():
        return build_model(QWEN3_30B_A3B, config)


@pytest.fixture
def configured(model: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Any]:
    def configure(settings: dict[str, Any]) -> Any:
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        for config in configs.values():
            for name, value in settings.items():
                assert hasattr(config, name), f"this release has no option {name}"
                monkeypatch.setattr(config, name, value)
        return model

    return configure


@pytest.mark.parametrize("recipe", [SLIME, VERL, VERL_CONTEXT], ids=["slime", "verl", "verl CP"])
def test_the_recipes_of_qwen3_30b_a3b_are_accepted(
    configured: Callable[[dict[str, Any]], Any], recipe: dict[str, Any]
) -> None:
    from megatron_trace import disable_fp4, enable_fp4

    model = configured(recipe)
    enable_fp4(model)
    experts = model.decoder.layers[0].mlp.experts
    assert "trace_weights" in experts.linear_fc1.__dict__
    assert "trace_fc2_input" in experts.__dict__
    disable_fp4(model)


def test_records_of_fc2_cannot_follow_a_hidden_permutation() -> None:
    from megatron_trace.layers.dispatch import HiddenPermutation, UnfollowedPermutation

    with pytest.raises(UnfollowedPermutation, match="guide without fc2"):
        _ = HiddenPermutation("MoEFlexTokenDispatcher").num_tokens
