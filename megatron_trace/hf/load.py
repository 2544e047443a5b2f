"""Loading a Hugging Face Qwen3-MoE checkpoint into this rank's part of a Megatron model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open
from torch import Tensor

from bridge.errors import TraceError
from megatron_trace.hf.local_part import LocalPart
from megatron_trace.hf.mapping import join, shard

ReadTensor = Callable[[str], Tensor]


class CheckpointMismatch(TraceError):
    """A checkpoint lacks a tensor, or a tensor has another shape than the model's."""


@torch.no_grad()
def load_hf(model: GPTModel, checkpoint: str | Path | Mapping[str, Tensor]) -> None:
    """Copy the weights of `checkpoint` into every parameter of `model`.

    Args:
        model: an unwrapped model of `build_model`.
        checkpoint: a directory with safetensors files, or tensors by Hugging Face name.

    Raises:
        CheckpointMismatch: naming the first tensor that is absent or has another shape.
    """
    read = checkpoint.__getitem__ if isinstance(checkpoint, Mapping) else _reader(Path(checkpoint))
    part = LocalPart(model)
    for name, parameter in model.named_parameters():
        source = part.source(name)
        try:
            whole = join(source, [read(hf_name) for hf_name in source.names], model.config)
        except KeyError as absent:
            raise CheckpointMismatch(
                f"The checkpoint has no tensor {absent}: load a complete Qwen3-MoE checkpoint."
            ) from None
        group = part.tensor_group(source)
        weight = shard(source, whole, group.rank(), group.size())
        if weight.shape != parameter.shape:
            raise CheckpointMismatch(
                f"{', '.join(source.names)} give a {tuple(weight.shape)} weight for {name}, which "
                f"is {tuple(parameter.shape)}: build the model from this checkpoint's config.json."
            )
        parameter.copy_(weight)


def _reader(directory: Path) -> ReadTensor:
    """Return a function that reads one tensor of a checkpoint directory by name."""
    files: list[Any] = [safe_open(path, "pt") for path in sorted(directory.glob("*.safetensors"))]
    if not files:
        raise CheckpointMismatch(
            f"{directory} holds no *.safetensors file: save the checkpoint as safetensors."
        )
    home = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> Tensor:
        tensor: Tensor = home[name].get_tensor(name)
        return tensor

    return read
