"""A Megatron GPT model of the Qwen3-MoE architecture, from a Hugging Face config.

It is built from Megatron's local layer spec, so it needs neither Transformer Engine nor Apex, with
sequential experts and two replaced parts: an RMSNorm that allows sequence parallelism, and a core
attention that takes packed sequences. Another spec, such as Transformer Engine's, can be given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from bridge.errors import TraceError
from megatron_trace.hf.packed_attention import PackedDotProductAttention


class UnsupportedCheckpoint(TraceError):
    """A Hugging Face checkpoint is not a Qwen3-MoE model this loader builds."""


class RmsNorm(torch.nn.RMSNorm):
    """An RMSNorm whose weight gradient is summed over sequence-parallel ranks.

    Megatron's wrapper of torch's norm refuses sequence parallelism for want of this mark.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def read_hf_config(checkpoint: str | Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint directory."""
    config: dict[str, Any] = json.loads((Path(checkpoint) / "config.json").read_text())
    return config


def transformer_config(hf: Mapping[str, Any], **overrides: Any) -> TransformerConfig:
    """Return Megatron's configuration of a Hugging Face Qwen3-MoE config.

    Args:
        hf: the content of config.json.
        overrides: any `TransformerConfig` field: parallel sizes, dtypes, recomputation.

    Raises:
        UnsupportedCheckpoint: if the model is not a Qwen3-MoE with experts in every layer.
    """
    _check(hf)
    dtype = overrides.pop("params_dtype", torch.float32)
    settings: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "num_moe_experts": _num_experts(hf),
        "moe_router_topk": hf["num_experts_per_tok"],
        # Softmax over the chosen logits is softmax over all of them, renormalized.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        # Megatron's fused kernels need Apex, Transformer Engine or a GPU.
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(settings | overrides))


def build_model(
    hf: Mapping[str, Any],
    config: TransformerConfig,
    *,
    max_sequence_length: int | None = None,
    vp_stage: int | None = None,
    spec: TransformerBlockSubmodules | None = None,
) -> GPTModel:
    """Build this rank's part of the model; load weights into it with `load_hf`.

    Args:
        hf: the content of config.json.
        config: from `transformer_config`.
        max_sequence_length: None takes the checkpoint's.
        vp_stage: the virtual pipeline stage, if there are several.
        spec: another layer spec, such as Transformer Engine's from Megatron-core's
            `get_gpt_decoder_block_spec`; None is the local one of this module.
    """
    return GPTModel(
        config=config,
        transformer_layer_spec=spec or _block_spec(config, vp_stage),
        vocab_size=hf["vocab_size"],
        max_sequence_length=max_sequence_length or hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(vp_stage=vp_stage, ignore_virtual=False),
        post_process=parallel_state.is_pipeline_last_stage(vp_stage=vp_stage, ignore_virtual=False),
        share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
        position_embedding_type="rope",
        rotary_base=_rope(hf)["rope_theta"],
        vp_stage=vp_stage,
    )


def _block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RmsNorm
    attention.core_attention = PackedDotProductAttention
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RmsNorm)


def _check(hf: Mapping[str, Any]) -> None:
    faults = {
        f"model_type is {hf.get('model_type')!r}": hf.get("model_type") != "qwen3_moe",
        "some layers are dense": hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1,
        "attention has biases": hf.get("attention_bias", False),
        "attention slides": hf.get("use_sliding_window", False),
        "rotary positions are scaled": _rope(hf)["rope_type"] != "default",
    }
    for fault, present in faults.items():
        if present:
            raise UnsupportedCheckpoint(
                f"The checkpoint cannot be loaded because {fault}: use a Qwen3-MoE checkpoint "
                "with experts in every layer and plain attention, or load the model yourself."
            )


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return theta and type of the rotary embedding, from either generation of config.json."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return {
        "rope_theta": rope.get("rope_theta", hf.get("rope_theta", 10000.0)),
        "rope_type": rope.get("rope_type", "default"),
    }


def _num_experts(hf: Mapping[str, Any]) -> int:
    """Return the number of experts; transformers 5 renamed the entry."""
    return int(hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"])
