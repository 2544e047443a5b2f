"""The one entry point from patched Megatron-core into this package.

Every function here is called by a line that a patch of `patches/megatron-core/` adds, and returns
its input untouched when `enable_fp4` has not marked the module. Nothing of Megatron is imported:
Megatron imports this module while it is itself being imported. No hook is compiled: torch.compile
would trace one micro-batch's records into the graph of all.

Shape legend: S sequence, B batch, H hidden size, P rows dispatched to this rank's experts, I the
experts' intermediate size, G key/value heads, D head size, T packed tokens.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megatron_trace.context import bind_scope, never_compiled


@never_compiled
def expert_input(moe_layer: nn.Module, hidden_states: Tensor) -> Tensor:
    """Round the experts' input [S, B, H] (site fc1), once per token, before dispatch."""
    site = moe_layer.__dict__.get("trace_experts")
    return hidden_states if site is None else site.round_input(hidden_states)


@never_compiled
def enter_experts(moe_layer: nn.Module, tokens_per_expert: Tensor, probs_P: Tensor) -> Tensor:
    """Bring the fc2 records to the dispatched rows; return the probabilities for the experts.

    They are 1 when FP4 is on: `leave_experts` weighs the outputs instead.
    """
    site = moe_layer.__dict__.get("trace_experts")
    return probs_P if site is None else site.enter(tokens_per_expert, probs_P)


@never_compiled
def leave_experts(moe_layer: nn.Module, output_PH: Tensor, probs_P: Tensor) -> Tensor:
    """Weigh the experts' outputs [P, H] with the router's probabilities [P]."""
    site = moe_layer.__dict__.get("trace_experts")
    return output_PH if site is None else site.leave(output_PH, probs_P)


@never_compiled
def expert_activation(mlp: nn.Module, activation_PI: Tensor) -> Tensor:
    """Round the input of fc2 [P, I] (site fc2) of one expert, or of all in a grouped layer."""
    site = mlp.__dict__.get("trace_fc2_input")
    return activation_PI if site is None else site.round_activation(activation_PI)


@never_compiled
def expert_weight(linear: nn.Module, weight: Tensor) -> Tensor:
    """Round an expert's weight as the rollout does, gradient straight through to the parameter."""
    site = linear.__dict__.get("trace_weight")
    if site is None:
        return weight
    # A parameter gather that overlaps the forward ends in a hook of each layer, so the weights of
    # experts that come later may not be there yet.
    rounded: Tensor = site.round_weight(weight, alone=bool(linear._forward_pre_hooks))
    return rounded


@never_compiled
def expert_weights(linear: nn.Module, weights: list[Tensor]) -> list[Tensor]:
    """Round the weights of a grouped linear layer, one per local expert, as `expert_weight`."""
    site = linear.__dict__.get("trace_weights")
    return weights if site is None else site.round_weights(weights)


@never_compiled
def shared_expert_input(shared_experts: nn.Module, hidden_states: Tensor) -> Tensor:
    """Return the unrounded hidden states [S, B, H], for shared experts inside the dispatcher."""
    site = shared_experts.__dict__.get("trace_shared_experts")
    return hidden_states if site is None else site.unrounded(hidden_states)


@never_compiled
def key_value(attention: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Round K after RoPE and V (sites k and v), [S, B, G, D] or packed [T, G, D]."""
    site = attention.__dict__.get("trace_key_value")
    return (key, value) if site is None else site.round_key_value(key, value)


@never_compiled
def bind_micro_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tie a function that will be recomputed to the micro-batch of the running forward."""
    return bind_scope(function)
