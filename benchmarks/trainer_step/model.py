"""Layers of Qwen3-30B-A3B's shape in Megatron-core with Transformer Engine, one GPU, one rank.

The settings are those of public recipes: grouped experts, fused permutation, rotary embedding and
activation, distributed data parallel with FP32 gradients, Adam with FP32 state.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from megatron_trace.hf import build_model, transformer_config

VOCABULARY = 32_768
SEQUENCE = 4096


def start_one_rank() -> None:
    """Make the process group and the model-parallel groups of one rank."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(0)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def hf_config(layers: int) -> dict[str, Any]:
    """The shape in Hugging Face's words."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": SEQUENCE,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


@dataclass
class Trainer:
    """A model, its optimizer, and a step over one micro-batch."""

    model: Any
    optimizer: Any
    tokens: Tensor

    @classmethod
    def build(cls, layers: int) -> Trainer:
        hf = hf_config(layers)
        config = transformer_config(
            hf,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=False,
            perform_initialization=True,
            moe_grouped_gemm=True,
            moe_permute_fusion=True,
            apply_rope_fusion=True,
            bias_activation_fusion=True,
            bias_dropout_fusion=True,
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        model = build_model(hf, config, spec=spec).cuda()
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        wrapped = DistributedDataParallel(config, ddp, model)
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-6, bf16=True, use_distributed_optimizer=True, clip_grad=1.0
        )
        optimizer = get_megatron_optimizer(settings, [wrapped])
        return cls(wrapped, optimizer, torch.empty(0))

    def step(self) -> None:
        """Forward, backward and optimizer step; the caller says under which records."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        positions = torch.arange(self.tokens.shape[1], device="cuda").expand_as(self.tokens)
        loss = self.model(self.tokens, positions, None, labels=self.tokens)
        loss.mean().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
