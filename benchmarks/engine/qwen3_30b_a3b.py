"""The shape of Qwen3-30B-A3B, for servers with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
# The same architecture for a host without GPU.
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "eos_token_id": 511,
    "bos_token_id": 510,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """Make a folder with config.json alone, which is what dummy weights need, and return it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder
