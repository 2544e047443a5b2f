"""Hugging Face checkpoints of Qwen3-MoE in Megatron-core, both ways."""

from megatron_trace.hf.digests import require_equal_weights, weight_digests
from megatron_trace.hf.export import export_hf
from megatron_trace.hf.load import load_hf
from megatron_trace.hf.qwen3_moe import build_model, transformer_config

__all__ = [
    "build_model",
    "export_hf",
    "load_hf",
    "require_equal_weights",
    "transformer_config",
    "weight_digests",
]
