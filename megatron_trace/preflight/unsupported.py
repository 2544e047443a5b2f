"""What FP4 guidance does not support in a Megatron model, each with its reason and its way out.

A model that is not refused runs exactly the functions that the patches hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from bridge.errors import TraceError
from bridge.fp4.nvfp4 import NVFP4_BLOCK
from megatron_trace.layers.expert_linears import weights_of
from patches.check.live import names_in


class UnsupportedModel(TraceError):
    """The model uses something that cannot be guided correctly yet."""


@dataclass(frozen=True)
class Unsupported:
    """One unsupported setting: when it applies, and the sentence that says why.

    Those of `experts_only` are in the way of rounded experts alone, not of FP4 keys and values.
    """

    applies: Callable[[TransformerConfig], Any]
    text: str
    experts_only: bool = False


def _newer(config: TransformerConfig, option: str) -> Any:
    """Return an option that older supported releases lack; what a release lacks is off."""
    return getattr(config, option, None)


def _offloads_expert_weights(config: TransformerConfig) -> bool:
    modules = config.offload_modules if config.fine_grained_activation_offloading else None
    return "expert_fc1" in (modules or ())


UNSUPPORTED = (
    Unsupported(
        lambda c: c.multi_latent_attention or c.experimental_attention_variant,
        "Latent, sparse or linear attention has no recorded K and V here: use plain attention.",
    ),
    Unsupported(
        lambda c: _newer(c, "use_transformer_engine_op_fuser"),
        "The fused expert path has no place between activation and fc2: set "
        "use_transformer_engine_op_fuser=False.",
        experts_only=True,
    ),
    Unsupported(
        lambda c: (
            _newer(c, "delay_wgrad_compute")
            or _newer(c, "overlap_dispatch_backward_with_experts_wgrad")
        ),
        "Delayed weight gradients look for the rounded weights after they are gone: set "
        "delay_wgrad_compute and overlap_dispatch_backward_with_experts_wgrad to False.",
        experts_only=True,
    ),
    Unsupported(
        lambda c: _newer(c, "moe_single_grouped_weight"),
        "moe_single_grouped_weight packs all experts into one parameter: set it to False.",
        experts_only=True,
    ),
    Unsupported(
        lambda c: c.overlap_moe_expert_parallel_comm,
        "overlap_moe_expert_parallel_comm interleaves two micro-batches in one layer: set it to "
        "False.",
    ),
    Unsupported(
        lambda c: c.moe_latent_size,
        "moe_latent_size projects the experts' input before dispatch, which the rollout's record "
        "does not describe: leave it unset.",
        experts_only=True,
    ),
    Unsupported(
        lambda c: (
            c.moe_expert_capacity_factor is not None
            or c.moe_pad_expert_input_to_capacity
            or c.moe_router_padding_for_quantization
        ),
        "Token dropping and padded routing change which expert slots exist: leave "
        "moe_expert_capacity_factor unset and moe_router_padding_for_quantization False.",
    ),
    Unsupported(
        lambda c: c.moe_apply_probs_on_input,
        "moe_apply_probs_on_input scales the recorded fc1 input: set it to False.",
        experts_only=True,
    ),
    Unsupported(
        lambda c: _newer(c, "moe_mlp_glu_interleave_size"),
        "moe_mlp_glu_interleave_size mixes gate and up rows: leave it unset.",
        experts_only=True,
    ),
    Unsupported(
        lambda c: c.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"),
        "Sinkhorn and quantile balancing choose experts without asking for a replay: use another "
        "moe_router_load_balancing_type.",
    ),
    Unsupported(
        lambda c: c.moe_enable_routing_replay,
        "moe_enable_routing_replay would replay twice: set it to False, the records replay the "
        "routing.",
    ),
    Unsupported(
        lambda c: c.fp8 or c.fp4,
        "Transformer Engine's own fp8 or fp4 would quantize a second time: unset fp8 and fp4.",
    ),
    Unsupported(
        lambda c: any(
            (_newer(c, option) or 1) > 1
            for option in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
        ),
        "Weights sharded for rematerialization have no whole blocks: set gtp_weight_remat_size and "
        "expert_gtp_weight_remat_size to 1.",
        experts_only=True,
    ),
    Unsupported(
        lambda c: c.cpu_offloading or _offloads_expert_weights(c),
        "Offloading what the experts' layers save would copy weights out of memory that the next "
        'layer reuses: set cpu_offloading to False, and leave "expert_fc1" out of offload_modules.',
        experts_only=True,
    ),
    Unsupported(
        lambda c: c.cuda_graph_impl != "none",
        'CUDA graphs would replay the first micro-batch\'s records: set cuda_graph_impl="none".',
    ),
)


def refuse_config(config: TransformerConfig, *, experts: bool = True) -> None:
    """Refuse a configuration that is not supported; `experts` says whether they are rounded.

    Raises:
        UnsupportedModel: with the reason and the setting that avoids it.
    """
    for refusal in UNSUPPORTED:
        if (experts or not refusal.experts_only) and refusal.applies(config):
            raise UnsupportedModel(refusal.text)


def refuse_model(modules: Iterable[nn.Module]) -> None:
    """Refuse a language model whose layers are not numbered as the records' are."""
    for module in modules:
        if isinstance(module, LanguageModule) and not isinstance(module, GPTModel):
            raise UnsupportedModel(
                f"{type(module).__name__} numbers its layers otherwise than the rollout's records: "
                "build the model as a GPTModel."
            )


def refuse_attention(attention: Attention) -> None:
    """Refuse an attention module whose K and V do not pass the hook."""
    _require_hooked(attention, Attention, "forward", "a layer's attention")
    if attention.config.num_query_groups < attention.pg_collection.tp.size():
        raise UnsupportedModel(
            f"{attention.config.num_query_groups} key/value heads cannot be split over "
            f"{attention.pg_collection.tp.size()} tensor-parallel ranks: use at most as many ranks "
            "as heads."
        )


def refuse_experts(moe_layer: MoELayer) -> None:
    """Refuse experts whose weights and activations do not pass the hooks."""
    _require_hooked(moe_layer, MoELayer, "routed_experts_compute", "a layer's MoE")
    _require_hooked(moe_layer, MoELayer, "preprocess", "a layer's MoE")
    if moe_layer.config.moe_shared_expert_overlap:
        shared = moe_layer.shared_experts
        _require_hooked(shared, SharedExpertMLP, "pre_forward_comm", "a layer's shared experts")
    experts = moe_layer.experts
    if isinstance(experts, SequentialMLP):
        if moe_layer.config.gradient_accumulation_fusion:
            raise UnsupportedModel(
                "With sequential experts gradient_accumulation_fusion writes to the parameter's "
                "main_grad past the rounded weight: set it to False, or use grouped experts "
                "(moe_grouped_gemm=True with Transformer Engine)."
            )
        for expert in experts.local_experts:
            _require_hooked(expert, MLP, "forward", "an expert")
            _require_hooked(expert.linear_fc1, ColumnParallelLinear, "forward", "an expert's fc1")
            _require_hooked(expert.linear_fc2, RowParallelLinear, "forward", "an expert's fc2")
    else:
        _require_grouped(experts)
    width = next(weights_of(experts, "linear_fc2")).shape[1]
    if width % NVFP4_BLOCK:
        raise UnsupportedModel(
            f"Expert tensor parallelism leaves {width} of the intermediate size to a rank, which "
            f"splits blocks of {NVFP4_BLOCK}: use a smaller expert_tensor_parallel_size."
        )


def _require_grouped(experts: nn.Module) -> None:
    """Refuse grouped experts whose layers do not ask the hook for their weights."""
    if getattr(type(experts), "forward", None) is not TEGroupedMLP.forward:
        raise UnsupportedModel(
            f"The experts are a {type(experts).__name__}, which our hooks do not know: use "
            "TEGroupedMLP (moe_grouped_gemm=True with Transformer Engine) or SequentialMLP "
            "(moe_grouped_gemm=False)."
        )
    for linear in (experts.linear_fc1, experts.linear_fc2):
        method = getattr(type(linear), "_get_weight_tensors", None)
        if method is None or "expert_weights" not in names_in(method.__code__):
            raise UnsupportedModel(
                f"The experts' {type(linear).__name__} does not ask our hook for its weights: use "
                "Megatron-core's TEGroupedLinear with Transformer Engine 2.0 or newer, or build "
                "the experts as SequentialMLP (moe_grouped_gemm=False)."
            )


def _require_hooked(module: nn.Module, base: type, method: str, role: str) -> None:
    if getattr(type(module), method, None) is not getattr(base, method):
        raise UnsupportedModel(
            f"{role} is a {type(module).__name__}, which does not run {base.__name__}.{method}: "
            "use Megatron-core's own layer specs, local or Transformer Engine."
        )
