"""Print a digest of loss and gradients of one step without FP4: the same on unpatched Megatron."""

# ruff: noqa: E402 - the CPU is prepared before Megatron is used

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import megatron.core
import torch
import torch.distributed as dist

from megatron_trace.preflight import cpu_host

cpu_host.prepare()

from megatron.core import parallel_state, tensor_parallel
from micro_batches import loss_of, packed_logits, padded_logits, random_sequences
from reference_rollout import HF_CONFIG, random_weights

from megatron_trace.hf import build_model, load_hf, transformer_config


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    sha = hashlib.sha256()
    sequences = random_sequences(9, 6, 12)
    for dtype in (torch.float32, torch.bfloat16):
        for dispatcher in ("alltoall", "allgather"):
            config = transformer_config(
                HF_CONFIG,
                params_dtype=dtype,
                moe_token_dispatcher_type=dispatcher,
                recompute_granularity="selective",
                recompute_modules=["core_attn", "moe"],
            )
            model = build_model(HF_CONFIG, config)
            load_hf(model, random_weights())
            for logits in (packed_logits, padded_logits):
                loss = loss_of(logits(model, sequences, None), sequences)
                loss.backward()
                sha.update(loss.detach().float().numpy().tobytes())
            for parameter in model.parameters():
                sha.update(parameter.grad.float().numpy().tobytes())
    print(Path(megatron.core.__file__).parent, sha.hexdigest())


if __name__ == "__main__":
    main()
