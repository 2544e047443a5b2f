"""One GRPO step under guidance, with Megatron's own DDP and optimizer."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from safetensors.torch import save_file
from torch import Tensor

from bridge.client.client import TraceClient
from bridge.client.records import TrajectoryRecords
from examples.demo.grpo import clipped_loss, group_advantages
from examples.demo.low_scales import describe_scales
from examples.demo.policy import Pack, fetch, logprobs, micro_batch, packs
from examples.demo.rollout import Sample
from examples.demo.stages import report_progress
from megatron_trace import Guidance, LogProbGap, enable_fp4
from megatron_trace.hf import export_hf, weight_digests
from megatron_trace.telemetry.report import Report

# Large for a real model; here one step has to move weights across FP4 boundaries to show anything.
LEARNING_RATE = 1e-3


def step(
    model: GPTModel, samples: list[Sample], client: TraceClient, checkpoint: Path, save: Path
) -> dict[str, Any]:
    """Fetch, forward, backward, optimizer step; writes the new checkpoint to `save`."""
    enable_fp4(model)
    weights = compare_weights(model, client, samples[0].weight_version)
    wrapped, optimizer = _optimizer_of(model)
    rewards_N = torch.tensor([s.reward for s in samples])
    advantages_N = group_advantages(rewards_N, torch.tensor([s.group for s in samples]))
    drawn = sum(sum(s.sampled) for s in samples)
    gap, report, loss_sum = LogProbGap(), Report({}), 0.0
    todo, first = list(packs(samples)), 0
    for done, pack in enumerate(todo):
        report_progress(done, len(todo))
        records = fetch(client, pack)
        batch = micro_batch(records, pack, Guidance(), pack.samples[0].weight_version)
        logprobs_T = logprobs(wrapped, pack, batch)
        advantages_T = _per_token(advantages_N[first : first + len(pack.samples)], pack)
        loss = clipped_loss(logprobs_T, pack.rollout_logprobs, advantages_T, pack.sampled) / drawn
        loss.backward()
        gap.add(logprobs_T, pack.rollout_logprobs, pack.sampled)
        report += batch.report()
        loss_sum += loss.item()
        first += len(pack.samples)
    finalize_model_grads([wrapped])
    _, grad_norm, _ = optimizer.step()
    save_checkpoint(model, checkpoint, save)
    return {
        "loss": loss_sum,
        "grad_norm": float(grad_norm),
        "reward_mean": rewards_N.mean().item(),
        "logprob_gap": gap.summary().to_dict(),
        "records": describe_records(client, samples, report),
        "weights": weights,
    }


@torch.no_grad()
def check(model: GPTModel, samples: list[Sample], client: TraceClient) -> dict[str, Any]:
    """The guided log-prob gap of a rollout made with the model's own weights."""
    enable_fp4(model)
    gap, report = LogProbGap(), Report({})
    for pack in packs(samples):
        version = pack.samples[0].weight_version
        batch = micro_batch(fetch(client, pack), pack, Guidance(), version)
        gap.add(logprobs(model, pack, batch), pack.rollout_logprobs, pack.sampled)
        report += batch.report()
    return {
        "reward_mean": sum(s.reward for s in samples) / len(samples),
        "logprob_gap": gap.summary().to_dict(),
        "records": describe_records(client, samples, report),
        "weights": compare_weights(model, client, samples[0].weight_version),
    }


def compare_weights(model: GPTModel, client: TraceClient, version: str) -> dict[str, int]:
    """How many expert matrices have other FP4 codes or scales than the rollout's of `version`."""
    theirs, ours = client.digests(version), weight_digests(model)
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    return {"matrices": len(ours), "differing": len(differing)}


def describe_records(client: TraceClient, samples: list[Sample], report: Report) -> dict[str, Any]:
    """What the bridge holds of these trajectories, and its bytes against the layout's formula.

    `bytes_per_token` are the record's own; `stored_bytes_per_token` has the store's
    bytes a message as well, not the index, whose pages are larger than this job.
    """
    names = {s.trajectory for s in samples}
    held = [t for t in client.list_trajectories() if t.trajectory in names]
    records, stats = [client.fetch(s.trajectory) for s in samples], client.stats()
    record = records[0]
    return {
        "trajectories": len(held),
        "positions": sum(t.rows for t in held),
        "rows": stats.forward_rows,
        "missing": sum(t.missing_forward + t.missing_kv for t in held) + report.total().missing,
        "guided_values": report.total().guided,
        "scales": describe_scales(report.total()),
        "bytes_per_token": record.forward.shape[1] + record.kv.shape[1],
        "bytes_per_token_formula": record.layout.bytes_per_token(),
        "stored_bytes_per_token": stats.memory_bytes / stats.forward_rows,
        "digest": digest_of(records),
        "layout": record.layout.to_dict(),
    }


def digest_of(records: Iterable[TrajectoryRecords]) -> str:
    """SHA-256 (hex) of the trajectories' tokens and records, bit for bit."""
    digest = hashlib.sha256()
    for each in records:
        for part in (each.tokens, each.forward, each.forward_valid, each.kv, each.kv_valid):
            digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def save_checkpoint(model: GPTModel, like: Path, path: Path) -> None:
    """The model as a Hugging Face checkpoint in BF16, with the config and tokenizer of `like`."""
    path.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path / file.name)
    tensors = dict(export_hf(model, torch.bfloat16))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _optimizer_of(model: GPTModel) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    config = OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, bf16=True, clip_grad=1.0)
    return wrapped, get_megatron_optimizer(config, [wrapped])


def _per_token(advantages_N: Tensor, pack: Pack) -> Tensor:
    return advantages_N.repeat_interleave(torch.tensor(pack.lengths))
