"""The trained policy: a Megatron-core Qwen3-MoE, fed with packed trajectories.

Shape legend: T tokens of a pack (all its trajectories but their last token, which has no
successor).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from bridge.client.client import TraceClient
from bridge.client.records import TrajectoryRecords
from examples.demo.rollout import Sample
from megatron_trace import Guidance, GuidedMicroBatch, guide
from megatron_trace.hf import build_model, load_hf, transformer_config
from megatron_trace.hf.qwen3_moe import read_hf_config

PACK_TOKENS = 1024


@dataclass(frozen=True)
class Pack:
    """Trajectories laid end to end, and what is known of every successor token.

    tokens, targets  int64 [1, T]: the input, and the token that follows each
    sampled          bool [T]: the target was drawn by the policy
    rollout_logprobs float32 [T]: of the target in the rollout, 0 where not sampled
    """

    samples: list[Sample]
    cu_seqlens: list[int]
    tokens: Tensor
    targets: Tensor
    sampled: Tensor
    rollout_logprobs: Tensor

    @classmethod
    def of(cls, samples: list[Sample]) -> Pack:
        """Packs whole trajectories; the last token of each is only a target."""
        lengths = [len(s.tokens) - 1 for s in samples]
        return cls(
            samples=samples,
            cu_seqlens=[0, *accumulate(lengths)],
            tokens=torch.tensor([[t for s in samples for t in s.tokens[:-1]]]),
            targets=torch.tensor([[t for s in samples for t in s.tokens[1:]]]),
            sampled=torch.tensor([d for s in samples for d in s.sampled[1:]]),
            rollout_logprobs=torch.tensor([p for s in samples for p in s.logprobs[1:]]),
        )

    @property
    def lengths(self) -> list[int]:
        """Input tokens of each trajectory."""
        return [len(s.tokens) - 1 for s in self.samples]

    def megatron_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        cu_seqlens = torch.tensor(self.cu_seqlens, dtype=torch.int32)
        longest = max(self.lengths)
        return {
            "input_ids": self.tokens,
            "position_ids": torch.cat([torch.arange(n) for n in self.lengths])[None],
            "attention_mask": None,
            "packed_seq_params": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
        }


def packs(samples: list[Sample]) -> Iterator[Pack]:
    """Packs of at most `PACK_TOKENS` tokens, in order."""
    waiting: list[Sample] = []
    for sample in samples:
        if waiting and sum(len(s.tokens) for s in (*waiting, sample)) > PACK_TOKENS:
            yield Pack.of(waiting)
            waiting = []
        waiting.append(sample)
    if waiting:
        yield Pack.of(waiting)


def load_policy(checkpoint: Path, seed: int, dtype: torch.dtype = torch.bfloat16) -> GPTModel:
    """The checkpoint in Megatron-core, on one rank."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    hf = read_hf_config(checkpoint)
    model = build_model(hf, transformer_config(hf, params_dtype=dtype))
    load_hf(model, checkpoint)
    return model


def fetch(client: TraceClient, pack: Pack) -> list[TrajectoryRecords]:
    """The records of a pack's trajectories, by name."""
    return [client.fetch(s.trajectory) for s in pack.samples]


def micro_batch(
    records: list[TrajectoryRecords], pack: Pack, guidance: Guidance, version: str
) -> GuidedMicroBatch:
    """Lines the records up with the pack's tokens."""
    return GuidedMicroBatch.from_records(
        records, pack.tokens, cu_seqlens=pack.cu_seqlens, weight_version=version, guidance=guidance
    )


def logprobs(model: torch.nn.Module, pack: Pack, batch: GuidedMicroBatch | None) -> Tensor:
    """Log-probabilities of the pack's targets, float32 [T]; guided when `batch` is given."""
    with guide(batch) if batch is not None else nullcontext():
        logits = model(**pack.megatron_inputs())
    all_logprobs = torch.log_softmax(logits[0].float(), dim=-1)
    return all_logprobs.gather(-1, pack.targets[0, :, None])[:, 0]
