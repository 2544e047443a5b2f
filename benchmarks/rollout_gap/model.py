"""A Qwen3-MoE checkpoint of medium size with random weights.

Their spread keeps what a layer adds to the residual stream small, as in `examples.tiny_model`: a
trained model's is small too, but this is not one, so the gaps say how well the trainer follows the
rollout and not what it does to training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
MATRIX, RESIDUAL, EMBEDDING, LM_HEAD, NORM = 0.035, 0.007, 1.0, 0.1, 0.1


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write config.json and the weights, once, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(seed)
    save_file(dict(_weights()), folder / "model.safetensors")
    return folder


def _weights() -> Iterator[tuple[str, Tensor]]:
    hidden, width = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    head, vocabulary = CONFIG["head_dim"], CONFIG["vocab_size"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", _matrix(EMBEDDING, vocabulary, hidden)
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", _norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", _norm(hidden)
        yield f"{layer}.self_attn.q_norm.weight", _norm(head)
        yield f"{layer}.self_attn.k_norm.weight", _norm(head)
        yield f"{layer}.self_attn.q_proj.weight", _matrix(MATRIX, queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", _matrix(MATRIX, keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", _matrix(MATRIX, keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", _matrix(RESIDUAL, hidden, queries)
        yield f"{layer}.mlp.gate.weight", _matrix(MATRIX, CONFIG["num_experts"], hidden)
        for expert in range(CONFIG["num_experts"]):
            prefix = f"{layer}.mlp.experts.{expert}"
            yield f"{prefix}.gate_proj.weight", _matrix(MATRIX, width, hidden)
            yield f"{prefix}.up_proj.weight", _matrix(MATRIX, width, hidden)
            yield f"{prefix}.down_proj.weight", _matrix(RESIDUAL, hidden, width)
    yield "model.norm.weight", _norm(hidden)
    yield "lm_head.weight", _matrix(LM_HEAD, vocabulary, hidden)


def _matrix(spread: float, *shape: int) -> Tensor:
    return (spread * torch.randn(shape)).bfloat16()


def _norm(size: int) -> Tensor:
    return (1 + NORM * torch.randn(size)).bfloat16()
