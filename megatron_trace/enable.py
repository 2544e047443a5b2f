"""Marking a Megatron model, so that the hooks know which layers to round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.distributed import ProcessGroup

from bridge.layout import ModelShape
from megatron_trace.config import TraceTrainerConfig
from megatron_trace.dispatch import AllGatherRecords, AllToAllRecords, RecordDispatcher
from megatron_trace.experts import Expert, ExpertLayer
from megatron_trace.key_values import KeyValues
from megatron_trace.live_check import require_live_hooks
from megatron_trace.parallel import TensorParallel
from megatron_trace.refusals import (
    UnsupportedModel,
    refuse_attention,
    refuse_config,
    refuse_experts,
)
from megatron_trace.routes import RecordedRoutes
from megatron_trace.weights import ExpertWeight

_MARKS = ("trace_experts", "trace_expert", "trace_weight", "trace_key_value")

Model = nn.Module | Sequence[nn.Module]


def enable_fp4(model: Model, config: TraceTrainerConfig | None = None) -> None:
    """Compute `model` in FP4 from now on, guided where a forward runs under `guide`.

    Args:
        model: a Megatron model, wrapped or not, or the list of its virtual pipeline chunks.
        config: what FP4 covers.

    Raises:
        UnpatchedMegatron: if the running Megatron-core lacks a hook.
        UnsupportedModel: if something in the model cannot be guided correctly, with the way out.
        LayoutError: if a size does not divide into FP4 blocks.
    """
    config = config or TraceTrainerConfig()
    require_live_hooks()
    layers = list(_layers(model))
    if not layers:
        raise UnsupportedModel(
            "The model has no TransformerLayer to round: pass the Megatron model itself."
        )
    refuse_config(layers[0].config)
    shape = shape_of(layers[0].config)
    for layer in layers:
        index = layer.layer_number - 1
        if isinstance(layer.mlp, MoELayer):
            refuse_experts(layer.mlp)
            _mark_experts(layer.mlp, index, shape, config)
        if config.kv_cache:
            refuse_attention(layer.self_attention)
            _mark_attention(layer.self_attention, index, shape)


def disable_fp4(model: Model) -> None:
    """Compute `model` as Megatron does, without FP4 and without routing replay."""
    for layer in _layers(model):
        for module in layer.modules():
            for mark in _MARKS:
                module.__dict__.pop(mark, None)
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.router.router_replay = None


def shape_of(config: TransformerConfig) -> ModelShape:
    """Return the sizes that records of a model with this configuration depend on."""
    num_layers = config.num_layers
    return ModelShape(
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_ffn_hidden_size,
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        moe_layers=tuple(i for i in range(num_layers) if _is_moe(config.moe_layer_freq, i)),
        attention_layers=tuple(range(num_layers)),
    )


def _is_moe(layer_freq: int | list[int], layer: int) -> bool:
    return layer % layer_freq == 0 if isinstance(layer_freq, int) else bool(layer_freq[layer])


def _layers(model: Model) -> Iterator[TransformerLayer]:
    for chunk in model if isinstance(model, Sequence) else (model,):
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                yield module


def _mark_experts(moe: MoELayer, layer: int, shape: ModelShape, config: TraceTrainerConfig) -> None:
    tokens = TensorParallel(moe.attn_tp_group, splits_tokens=moe.config.sequence_parallel)
    moe.router.router_replay = RecordedRoutes(layer, shape, tokens)
    if not config.experts:
        return
    moe.trace_experts = ExpertLayer(layer, shape, tokens, _record_dispatcher(moe))
    shard_group = _shared(moe.experts.tp_group)
    for index, expert in enumerate(moe.experts.local_experts):
        expert.trace_expert = Expert(index, shard_group)
        projections = 2 if moe.config.gated_linear_unit else 1
        expert.linear_fc1.trace_weight = ExpertWeight(projections, config.weight_dtype, shard_group)
        expert.linear_fc2.trace_weight = ExpertWeight(1, config.weight_dtype, shard_group)


def _record_dispatcher(moe: MoELayer) -> RecordDispatcher:
    dispatcher = moe.token_dispatcher
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        return AllToAllRecords(dispatcher)
    return AllGatherRecords(dispatcher)


def _shared(group: ProcessGroup) -> ProcessGroup | None:
    return group if group.size() > 1 else None


def _mark_attention(attention: Attention, layer: int, shape: ModelShape) -> None:
    heads = TensorParallel(attention.pg_collection.tp, splits_tokens=False)
    attention.trace_key_value = KeyValues(layer, shape, heads)
