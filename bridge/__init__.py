"""Records of FP4 rollouts between inference engines and trainers.

An engine sends with `RecordProducer`, a trainer reads with `TraceClient`; `python -m bridge serve`
runs the daemon between them. Names are looked up when they are used: an engine needs no torch, and
neither side needs the daemon.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.client.client import TraceClient
    from bridge.client.records import TrajectoryRecords
    from bridge.errors import TraceError
    from bridge.producer.producer import RecordProducer

__all__ = ["RecordProducer", "TraceClient", "TraceError", "TrajectoryRecords"]

_MODULES = {
    "RecordProducer": "producer.producer",
    "TraceClient": "client.client",
    "TraceError": "errors",
    "TrajectoryRecords": "client.records",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
