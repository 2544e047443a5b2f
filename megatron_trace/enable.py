"""Marking a Megatron model, so that the hooks know which layers to round."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from bridge.layout import ModelShape, Site
from megatron_trace.config import TraceTrainerConfig
from megatron_trace.entry import LayerEntry, unwatch, watch, watch_inputs, watched
from megatron_trace.layers.dispatch import (
    AllGatherRecords,
    AllToAllRecords,
    HiddenPermutation,
    RecordDispatcher,
)
from megatron_trace.layers.expert_linears import ExpertLinears
from megatron_trace.layers.experts import ExpertLayer, SharedExpertInput
from megatron_trace.layers.key_values import KeyValues
from megatron_trace.layers.router_replay import RecordedRoutes
from megatron_trace.layers.weights import ExpertWeight, GroupedWeights
from megatron_trace.parallel import TensorParallel
from megatron_trace.preflight.hook_check import require_live_hooks
from megatron_trace.preflight.unsupported import (
    UnsupportedModel,
    refuse_attention,
    refuse_config,
    refuse_experts,
    refuse_model,
)
from megatron_trace.rounding.work_buffer import free_work_buffers

log = logging.getLogger(__name__)

_WEIGHT_MARKS = ("trace_weight", "trace_weights")
_MARKS = (
    *("trace_experts", "trace_fc2_input", "trace_shared_experts", "trace_key_value"),
    *_WEIGHT_MARKS,
)
_EXPERT_SITES = frozenset((Site.FC1, Site.FC2))
_ROUTE_SITES = frozenset((Site.ROUTES,))
_KV_SITES = frozenset((Site.K, Site.V))

Model = nn.Module | Sequence[nn.Module]
# A module, the attribute that marks it, and what the hooks find there.
_Mark = tuple[nn.Module, str, Any]


def enable_fp4(model: Model, config: TraceTrainerConfig | None = None) -> None:
    """Compute `model` in FP4 from now on, guided where a forward runs under `guide`.

    Everything is checked before anything is marked: a model that is refused stays as it was. Called
    again, the last configuration holds. A pipeline stage without layers is accepted. A model
    without experts gets FP4 keys and values.

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
    refuse_model(_modules(model))
    layers = list(_layers(model))
    if not layers and not any(isinstance(module, GPTModel) for module in _modules(model)):
        raise UnsupportedModel(
            "The model has no TransformerLayer to round: pass the Megatron model itself."
        )
    marks = [mark for layer in layers for mark in _marks(layer, config)]
    entries = [(layer, _entry(layer, config)) for layer in layers]
    disable_fp4(model)
    for module, name, mark in marks:
        setattr(module, name, mark)
    for layer, entry in entries:
        watch(layer, entry.enter)
    for chunk in _chunks(model):
        watch_inputs(chunk)
    log.info(
        "The rounded expert weights take %.3f GiB on this rank from the first forward after an "
        "optimizer step to the next step; free_rounded_weights(model) frees them in between.",
        _kept_bytes(model) / 2**30,
    )


def disable_fp4(model: Model) -> None:
    """Compute `model` as Megatron does, without FP4 and without routing replay."""
    for chunk in _chunks(model):
        for module in list(watched(chunk)):
            unwatch(module)
    for layer in _layers(model):
        for module in layer.modules():
            for mark in _MARKS:
                module.__dict__.pop(mark, None)
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.router.router_replay = None


def free_rounded_weights(model: Model) -> int:
    """Free the rounded expert weights, as an optimizer step does; return how many bytes they took.

    For a trainer that leaves the device to the rollout. The next forward rounds them again, and a
    forward whose backward has not run keeps what it needs.
    """
    freed: int = sum(site.free() for site in _weight_sites(model))
    return freed + free_work_buffers()


def _kept_bytes(model: Model) -> int:
    groups = (module.__dict__.get("trace_experts") for module in _modules(model))
    return sum(group.kept_bytes for site in groups if site for group in site.weights)


def _weight_sites(model: Model) -> Iterator[ExpertWeight | GroupedWeights]:
    for module in _modules(model):
        yield from (module.__dict__[mark] for mark in _WEIGHT_MARKS if mark in module.__dict__)


def shape_of(config: TransformerConfig) -> ModelShape:
    """Return the sizes that records of a model with this configuration depend on."""
    num_layers, experts = config.num_layers, config.num_moe_experts
    return ModelShape(
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_ffn_hidden_size if experts else 0,
        num_experts=experts or 0,
        top_k=config.moe_router_topk if experts else 0,
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        moe_layers=tuple(
            i for i in range(num_layers) if experts and _is_moe(config.moe_layer_freq, i)
        ),
        attention_layers=tuple(range(num_layers)),
    )


def _is_moe(layer_freq: int | list[int], layer: int) -> bool:
    return layer % layer_freq == 0 if isinstance(layer_freq, int) else bool(layer_freq[layer])


def _chunks(model: Model) -> Sequence[nn.Module]:
    return model if isinstance(model, Sequence) else (model,)


def _modules(model: Model) -> Iterator[nn.Module]:
    for chunk in _chunks(model):
        yield from chunk.modules()


def _layers(model: Model) -> Iterator[TransformerLayer]:
    """Yield the layers that are recorded; those for multi-token prediction stay in BF16."""
    unrecorded = {
        id(layer)
        for block in _modules(model)
        if isinstance(block, MultiTokenPredictionBlock)
        for layer in block.modules()
    }
    for module in _modules(model):
        if isinstance(module, TransformerLayer) and id(module) not in unrecorded:
            yield module


def _marks(layer: TransformerLayer, config: TraceTrainerConfig) -> Iterator[_Mark]:
    """Yield what marks a layer; raise UnsupportedModel if it cannot be guided."""
    refuse_config(layer.config, experts=config.experts)
    index, shape = layer.layer_number - 1, shape_of(layer.config)
    if isinstance(layer.mlp, MoELayer):
        yield from _expert_marks(layer.mlp, index, shape, config)
    if config.kv_cache:
        refuse_attention(layer.self_attention)
        heads = TensorParallel(layer.self_attention.pg_collection.tp, splits_tokens=False)
        yield layer.self_attention, "trace_key_value", KeyValues(index, shape, heads)


def _expert_marks(
    moe: MoELayer, layer: int, shape: ModelShape, config: TraceTrainerConfig
) -> Iterator[_Mark]:
    tokens = TensorParallel(moe.attn_tp_group, splits_tokens=moe.config.sequence_parallel)
    yield moe.router, "router_replay", RecordedRoutes(layer, shape, tokens)
    if not config.experts:
        return
    refuse_experts(moe)
    linears = ExpertLinears(moe.experts, moe.config.gated_linear_unit, config.weight_dtype)
    # Megatron-core switches the module's own flag off while it generates.
    overlapped = moe.shared_experts if moe.config.moe_shared_expert_overlap else None
    records = _record_dispatcher(moe)
    site = ExpertLayer(
        layer,
        shape,
        tokens,
        records,
        linears.groups,
        overlaps_shared=overlapped is not None,
        are_grouped=linears.are_grouped,
        learns_at_fc2=linears.sees_all_rows,
    )
    yield moe, "trace_experts", site
    if overlapped is not None:
        yield overlapped, "trace_shared_experts", SharedExpertInput()
    yield from linears.marks()


def _record_dispatcher(moe: MoELayer) -> RecordDispatcher:
    dispatcher = moe.token_dispatcher
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        return AllToAllRecords(dispatcher)
    if isinstance(dispatcher, MoEAllGatherTokenDispatcher):
        return AllGatherRecords(dispatcher)
    return HiddenPermutation(type(dispatcher).__name__)


def _entry(layer: TransformerLayer, config: TraceTrainerConfig) -> LayerEntry:
    marked, possible = set[Site](), set(_KV_SITES)
    if config.kv_cache:
        marked |= _KV_SITES
    if isinstance(layer.mlp, MoELayer):
        possible |= _EXPERT_SITES | _ROUTE_SITES
        marked |= _ROUTE_SITES | (_EXPERT_SITES if config.experts else frozenset())
    tokens = TensorParallel(layer.tp_group, splits_tokens=layer.config.sequence_parallel)
    return LayerEntry(tokens, frozenset(marked), frozenset(possible))
