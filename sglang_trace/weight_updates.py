"""Which requests to a scheduler change its weights, and what is left to do after them.

The releases differ here. Later ones update from tensors and process groups within a session, whose
end runs the post-load pass that quantizes; earlier ones load and never run it. Later ones tell the
scheduler what the weights are called; to earlier ones only the update itself says it.
"""

from __future__ import annotations

from typing import Any

from sglang_trace.moe_method import moe_layers

# Names of SGLang's request classes; some releases lack some of them.
LOADS = frozenset({"UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput"})
LOADS_AND_QUANTIZES = frozenset(
    {"UpdateWeightFromDiskReqInput", "UpdateWeightsFromIPCReqInput", "EndWeightUpdateReqInput"}
)
RENAMES = frozenset({"UpdateWeightVersionReqInput"})
CHANGES_WEIGHTS = LOADS | LOADS_AND_QUANTIZES | RENAMES


def complete_update(weight_updater: Any, request: Any) -> bool:
    """Quantize what an update has left unquantized; False if the weights are not to be used yet.

    A request that failed counts as well: it may have replaced some of the weights.
    """
    name = type(request).__name__
    if name not in CHANGES_WEIGHTS:
        return False
    if hasattr(weight_updater, "_session"):
        return weight_updater._session is None
    if name in LOADS:
        quantize_again(weight_updater.tp_worker.model_runner.model)
    return True


def quantize_again(model: Any) -> None:
    """Quantize the experts from their BF16 masters, which an update has written to."""
    for _name, layer, method in moe_layers(model):
        method.process_weights_after_loading(layer)


def version_after(scheduler: Any, request: Any, reply: Any) -> str | None:
    """Return what the weights are called now, None if this update did not name them."""
    if hasattr(scheduler, "record_weight_version_change"):
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    return getattr(request, "weight_version", None) if reply.success else None
