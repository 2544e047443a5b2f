"""How block scales of two bits were read, for the report."""

from __future__ import annotations

from typing import Any

from megatron_trace.telemetry.report import SiteCount


def describe_scales(count: SiteCount) -> dict[str, Any]:
    """Scales read from two bits, and the shares that were ambiguous and, where known, wrong."""
    return {
        "read": count.read_scales,
        "ambiguous_share": count.ambiguous_share,
        "wrong_share": count.wrong_share,
        "silent": count.silent_scales,
    }
