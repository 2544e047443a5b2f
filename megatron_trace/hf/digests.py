"""Proving that trainer and rollout hold the same FP4 weights."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from bridge.client.client import TraceClient
from bridge.errors import TraceError
from bridge.fp4.digest import digest
from bridge.fp4.nvfp4 import quantize_weight
from megatron_trace.hf.export import export_hf


class WeightsDiffer(TraceError):
    """The rollout quantized other weights than the trainer holds."""


def weight_digests(model: GPTModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """Return the digest of every expert matrix as the rollout quantizes it, by Hugging Face name.

    Every rank of the pipeline stage must call, as for `export_hf`. `dtype` is the dtype in which
    the rollout receives the weights.
    """
    return {
        name: digest(quantize_weight(tensor))
        for name, tensor in export_hf(model, dtype)
        if ".mlp.experts." in name
    }


def require_equal_weights(
    model: GPTModel,
    client: TraceClient,
    weight_version: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compare every expert matrix of this pipeline stage with the rollout's, bit for bit.

    Raises:
        WeightsDiffer: if the rollout reported other code words or scales, or none, for a matrix.
    """
    theirs = client.digests(weight_version)
    ours = weight_digests(model, dtype)
    differing = [name for name, value in ours.items() if theirs.get(name) != value]
    if differing:
        raise WeightsDiffer(
            f"{len(differing)} of {len(ours)} expert matrices are not the rollout's of weight "
            f"version {weight_version!r}, the first is {differing[0]}: send the trainer's weights "
            "to the rollout again."
        )
