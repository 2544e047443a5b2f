"""Train a small MoE GPT with nothing but Megatron-core, and write every number it computed.

Started by torchrun with the tree under comparison first on the path, once for each number of ranks:
`python -m torch.distributed.run --nproc-per-node N -m scripts.unchanged.training_job DIRECTORY`.
Each rank writes `DIRECTORY/<layout>.<rank>.json`: losses and gradient norms as exact numbers, every
gradient and every updated weight as a digest of its bytes.

Shape legend: B sequences of a micro-batch, S tokens of a sequence.
"""

# ruff: noqa: E402 - the CPU is prepared before Megatron is imported

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.unchanged import cpu_as_cuda

cpu_as_cuda.prepare()

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

STEPS = 2
MICRO_BATCHES, B, S, VOCABULARY = 2, 2, 24, 96
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE_RECOMPUTE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "moe"],
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one rank, full recompute": FULL_RECOMPUTE,
        "one rank, selective recompute, FP32": SELECTIVE_RECOMPUTE | {"bf16": False},
        "one rank, allgather dispatch": {"moe_token_dispatcher_type": "allgather"},
    },
    2: {
        "expert parallel, selective recompute": SELECTIVE_RECOMPUTE
        | {"expert_model_parallel_size": 2},
        "pipeline parallel, full recompute": FULL_RECOMPUTE | {"pipeline_model_parallel_size": 2},
    },
}


def transformer_config(layout: dict[str, Any]) -> TransformerConfig:
    """Grouped-query attention and 8 SwiGLU experts, 2 of them a token, in each of 4 layers."""
    bf16 = layout.get("bf16", True)
    dtype = torch.bfloat16 if bf16 else torch.float32
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 96,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**(settings | layout))


def build(config: TransformerConfig) -> tuple[Any, Any]:
    """This rank's part of the model in Megatron's DDP wrapper, and Megatron's Adam for it."""
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        vocab_size=VOCABULARY,
        max_sequence_length=S,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    if config.bf16:
        model = model.bfloat16()
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    settings = OptimizerConfig(lr=1e-2, bf16=config.bf16, params_dtype=config.params_dtype)
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped, get_megatron_optimizer(settings, [wrapped])


def token_batches(step: int) -> Iterator[Tensor]:
    """Micro-batches [B, S + 1] of this data-parallel rank."""
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    for _ in range(MICRO_BATCHES):
        yield torch.randint(VOCABULARY, (B, S + 1), generator=generator)


def forward_step(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    """Megatron's schedules call this for every micro-batch."""
    tokens = next(batches)
    future = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(S).expand(B, S)
    losses_BS = model(tokens[:, :-1], positions, future, labels=tokens[:, 1:])

    def mean_loss(losses_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses_BS.float().mean()
        return loss, {"loss": loss.detach()}

    return losses_BS, mean_loss


def digest(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and bytes."""
    plain = tensor.detach().contiguous()
    head = f"{plain.dtype} {tuple(plain.shape)} ".encode()
    return hashlib.sha256(head + plain.view(torch.uint8).numpy().tobytes()).hexdigest()


def train(layout: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Run all steps of one layout; what is compared, by kind and name."""
    sizes = {name: size for name, size in layout.items() if name.endswith("_parallel_size")}
    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    config = transformer_config(layout)
    model, optimizer = build(config)
    measured: dict[str, dict[str, str]] = {"losses": {}, "gradients": {}, "weights": {}}
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=token_batches(step),
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=S,
            micro_batch_size=B,
            forward_only=False,
        )
        for i, entry in enumerate(losses):
            measured["losses"][f"step {step} micro-batch {i}"] = entry["loss"].item().hex()
        for name, parameter in model.named_parameters():
            measured["gradients"][f"step {step} {name}"] = digest(parameter.main_grad)
        _, norm, _ = optimizer.step()
        measured["losses"][f"step {step} gradient norm"] = float(norm).hex()
        for name, parameter in model.named_parameters():
            measured["weights"][f"step {step} {name}"] = digest(parameter)
    parallel_state.destroy_model_parallel()
    return measured


def main(directory: Path) -> None:
    """Train every layout for this number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, layout in LAYOUTS[dist.get_world_size()].items():
        result = {"imported": parallel_state.__file__, **train(layout)}
        (directory / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
