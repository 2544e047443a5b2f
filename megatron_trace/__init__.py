"""The trainer side: Megatron-core forwards that round as the recorded rollout did.

Names are looked up when they are used: patched Megatron imports `megatron_trace.hooks` while it is
itself being imported, and this package's other modules import Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_trace.config import TraceTrainerConfig
    from megatron_trace.context import guide
    from megatron_trace.enable import disable_fp4, enable_fp4, free_rounded_weights
    from megatron_trace.hooks import bind_micro_batch
    from megatron_trace.records.feed import MicroBatchRequest, RecordFeed
    from megatron_trace.records.fetch import fetch_records
    from megatron_trace.records.guidance import Guidance
    from megatron_trace.records.microbatch import GuidedMicroBatch
    from megatron_trace.telemetry.log_prob_gap import LogProbGap
    from megatron_trace.telemetry.log_probs import token_logprobs
    from megatron_trace.telemetry.step_metrics import step_metrics, write_step

__all__ = [
    "Guidance",
    "GuidedMicroBatch",
    "LogProbGap",
    "MicroBatchRequest",
    "RecordFeed",
    "TraceTrainerConfig",
    "bind_micro_batch",
    "disable_fp4",
    "enable_fp4",
    "fetch_records",
    "free_rounded_weights",
    "guide",
    "step_metrics",
    "token_logprobs",
    "write_step",
]

_HOME = {
    "Guidance": "records.guidance",
    "GuidedMicroBatch": "records.microbatch",
    "TraceTrainerConfig": "config",
    "bind_micro_batch": "hooks",
    "disable_fp4": "enable",
    "enable_fp4": "enable",
    "fetch_records": "records.fetch",
    "free_rounded_weights": "enable",
    "guide": "context",
    "MicroBatchRequest": "records.feed",
    "RecordFeed": "records.feed",
    "LogProbGap": "telemetry.log_prob_gap",
    "step_metrics": "telemetry.step_metrics",
    "token_logprobs": "telemetry.log_probs",
    "write_step": "telemetry.step_metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
