"""The reverse of loading: a Megatron model as Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather

from megatron_trace.hf.local_part import LocalPart
from megatron_trace.hf.mapping import Source, split, unshard


@torch.no_grad()
def export_hf(model: GPTModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors of this pipeline stage by Hugging Face name.

    Every rank of the stage must run the iteration to its end, because parts are gathered over
    tensor and expert parallelism; every rank gets every tensor of its stage.

    Args:
        model: an unwrapped model of `build_model`.
        dtype: convert to this dtype, the rollout's; None keeps the parameters'.
    """
    part = LocalPart(model)
    for name, parameter in model.named_parameters():
        source = part.source(name)
        whole = unshard(source, _gathered(parameter.detach(), part.tensor_group(source)))
        for owner, tensor in _by_owner(source, whole, part):
            for hf_name, piece in zip(owner.names, split(owner, tensor, model.config), strict=True):
                yield hf_name, piece.to(dtype or piece.dtype).contiguous()


def _gathered(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _by_owner(source: Source, whole: Tensor, part: LocalPart) -> Iterator[tuple[Source, Tensor]]:
    """Yield the tensor as it is, or for an expert those of every expert-parallel rank."""
    if source.expert is None:
        yield source, whole
        return
    group = part.expert_group
    first = source.expert - group.rank() * part.num_local_experts
    for rank, tensor in enumerate(_gathered(whole, group)):
        expert = first + rank * part.num_local_experts
        names = (
            name.replace(f".experts.{source.expert}.", f".experts.{expert}.")
            for name in source.names
        )
        yield replace(source, names=tuple(names), expert=expert), tensor
