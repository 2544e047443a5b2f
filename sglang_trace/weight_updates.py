"""Which requests to a scheduler change its weights, and what the weights are called afterwards.

The releases differ here. Later ones update from tensors and process groups within a session. Later
ones tell the scheduler what the weights are called; to earlier ones only the update itself says it.
"""

from __future__ import annotations

from typing import Any

# Names of SGLang's request classes; some releases lack some of them.
CHANGES_WEIGHTS = frozenset(
    {
        *("UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput"),
        *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromIPCReqInput"),
        *("EndWeightUpdateReqInput", "UpdateWeightVersionReqInput"),
    }
)


def changes_weights(weight_updater: Any, request: Any) -> bool:
    """Whether the weights that are served, or their name, may be others after this request.

    A request that failed counts as well: it may have replaced some of the weights. Within a session
    nothing counts before its end.
    """
    if type(request).__name__ not in CHANGES_WEIGHTS:
        return False
    return getattr(weight_updater, "_session", None) is None


def version_after(scheduler: Any, request: Any, reply: Any) -> str | None:
    """Return what the weights are called now, None if this update did not name them."""
    if hasattr(scheduler, "record_weight_version_change"):
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    return getattr(request, "weight_version", None) if reply.success else None
