"""Which requests to a scheduler change its weights, and what the weights are called afterwards.

The releases differ here. Later ones update from tensors and process groups within a session. Later
ones tell the scheduler what the weights are called; to earlier ones only the update itself says it.
"""

from __future__ import annotations

from typing import Any

from bridge.errors import TraceError


class WeightsNotNamed(TraceError):
    """The scheduler does not call its weights what the update named them."""


# Names of SGLang's request classes; some releases lack some of them.
CHANGES_WEIGHTS = frozenset(
    {
        *("UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput"),
        *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromIPCReqInput"),
        *("EndWeightUpdateReqInput", "UpdateWeightVersionReqInput"),
    }
)


def changes_weights(request: Any) -> bool:
    """Whether the weights that are served, or their name, may be others after this request.

    A request that failed counts as well: it may have replaced some of the weights.
    """
    return type(request).__name__ in CHANGES_WEIGHTS


def in_session(weight_updater: Any) -> bool:
    """Whether an update has begun and not ended: weights arrive in pieces."""
    return getattr(weight_updater, "_session", None) is not None


def version_after(scheduler: Any, request: Any, reply: Any) -> str | None:
    """Return what the weights are called now, None if this update did not name them.

    Raises:
        WeightsNotNamed: the scheduler knows versions and took this update, but not its name.
    """
    named = getattr(request, "weight_version", None)
    succeeded = getattr(reply, "success", True)
    if not hasattr(scheduler, "record_weight_version_change"):
        return named if succeeded else None
    from sglang.srt.runtime_context import get_serving

    current = str(get_serving().weight_version)
    if succeeded and named not in (None, current):
        raise WeightsNotNamed(
            f"SGLang took weights named {named!r} and calls them {current!r}, so records would "
            "name the wrong weights: restart the server, or name them by update_weight_version."
        )
    return current
