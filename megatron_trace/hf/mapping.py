"""Which Hugging Face tensors make up each Megatron parameter, and how.

Shape legend: O, I out and in features; Q query heads per group, G key/value groups, D head size, H
hidden size, F an expert's intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Join(Enum):
    """How Hugging Face matrices become one Megatron matrix."""

    ONE = "one"
    QKV = "qkv"  # heads interleaved by key/value group: Q queries, one key, one value
    GATE_UP = "gate_up"  # gate above up, in every tensor-parallel part


@dataclass(frozen=True)
class Source:
    """Where one Megatron parameter comes from.

    names       Hugging Face names, in the order in which `join` takes them
    split_dim   the dimension that tensor parallelism splits; None is replicated
    expert      the global expert it belongs to; experts are split over another group
    """

    names: tuple[str, ...]
    join: Join = Join.ONE
    split_dim: int | None = None
    expert: int | None = None


_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": Source(("model.embed_tokens.weight",), split_dim=0),
    "decoder.final_layernorm.weight": Source(("model.norm.weight",)),
    "output_layer.weight": Source(("lm_head.weight",), split_dim=0),
}

_IN_LAYER = {
    "input_layernorm.weight": Source(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Source(("post_attention_layernorm.weight",)),
    "self_attention.q_layernorm.weight": Source(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Source(("self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.weight": Source(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        Join.QKV,
        split_dim=0,
    ),
    "self_attention.linear_proj.weight": Source(("self_attn.o_proj.weight",), split_dim=1),
    # Transformer Engine's layers have the norm before them inside.
    "self_attention.linear_qkv.layer_norm_weight": Source(("input_layernorm.weight",)),
    "mlp.router.weight": Source(("mlp.gate.weight",)),
}

_IN_EXPERT = {
    "linear_fc1.weight": Source(("gate_proj.weight", "up_proj.weight"), Join.GATE_UP, split_dim=0),
    "linear_fc2.weight": Source(("down_proj.weight",), split_dim=1),
}

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Sequential experts are modules, grouped ones are numbered weights of one module.
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)")


def source_of(parameter: str, first_layer: int, first_expert: int) -> Source:
    """Return the source of a parameter of this rank's model.

    Args:
        parameter: its name in the unwrapped GPTModel.
        first_layer: the global index of this pipeline stage's first layer.
        first_expert: the global index of this rank's first expert.

    Raises:
        KeyError: if the parameter is not one of the Qwen3-MoE architecture.
    """
    in_layer = _LAYER.fullmatch(parameter)
    if in_layer is None:
        return _OUTSIDE_LAYERS[parameter]
    prefix = f"model.layers.{first_layer + int(in_layer[1])}."
    in_expert = _in_expert(in_layer[2])
    if in_expert is None:
        return _prefixed(prefix, _IN_LAYER[in_layer[2]], None)
    expert = first_expert + in_expert[0]
    return _prefixed(f"{prefix}mlp.experts.{expert}.", _IN_EXPERT[in_expert[1]], expert)


def _in_expert(name: str) -> tuple[int, str] | None:
    """Return the local expert that a parameter of a layer belongs to, and its name in there."""
    if found := _EXPERT.fullmatch(name):
        return int(found[1]), found[2]
    if found := _GROUPED_EXPERT.fullmatch(name):
        return int(found[2]), found[1]
    return None


def join(source: Source, tensors: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    """Return the whole Megatron matrix of whole Hugging Face tensors."""
    if source.join is Join.QKV:
        groups = [_by_group(tensor, config) for tensor in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)
    return torch.cat(list(tensors))


def split(source: Source, whole: Tensor, config: TransformerConfig) -> list[Tensor]:
    """Return the whole Hugging Face tensors of a whole Megatron matrix; the inverse of `join`."""
    if source.join is Join.QKV:
        d = config.kv_channels
        groups = _by_group(whole, config)
        parts = (groups[:, : -2 * d], groups[:, -2 * d : -d], groups[:, -d:])
        return [part.flatten(0, 1) for part in parts]
    return list(whole.chunk(len(source.names)))


def shard(source: Source, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return one tensor-parallel rank's part of a whole Megatron matrix."""
    if source.split_dim is None:
        return whole
    stacked = whole.chunk(2) if source.join is Join.GATE_UP else (whole,)
    return torch.cat([part.chunk(size, source.split_dim)[rank] for part in stacked])


def unshard(source: Source, parts: Sequence[Tensor]) -> Tensor:
    """Return the whole Megatron matrix of all ranks' parts; the inverse of `shard`."""
    if source.split_dim is None:
        return parts[0]
    if source.join is Join.GATE_UP:
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat((*gates, *ups))
    return torch.cat(list(parts), dim=source.split_dim)


def _by_group(matrix: Tensor, config: TransformerConfig) -> Tensor:
    """View rows by key/value group: [G, rows of a group, H]."""
    return matrix.reshape(config.num_query_groups, -1, matrix.shape[-1])


def _prefixed(prefix: str, source: Source, expert: int | None) -> Source:
    names = tuple(prefix + name for name in source.names)
    return Source(names, source.join, source.split_dim, expert)
