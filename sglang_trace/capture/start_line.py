"""The line that a server logs when its capture starts."""

from __future__ import annotations

from collections.abc import Iterable

from bridge.layout import RecordLayout, Site
from sglang_trace.config import TraceConfig


def start_line(layout: RecordLayout, config: TraceConfig) -> str:
    """Return what is captured, its bytes per token and the bridges that its rows go to.

    `layout` is that of the whole model, not of one rank.
    """
    quantized = [site for site in layout.sites if site is not Site.ROUTES]
    recorded = []
    if quantized:
        recorded.append(
            f"{','.join(quantized)} of layers {_listed(layout.layers_of(*quantized))} "
            f"(bits per code word: {layout.bits}, per block scale: {layout.scale_bits})"
        )
    if Site.ROUTES in layout.sites:
        recorded.append(f"routes of layers {_listed(layout.site_layers(Site.ROUTES))}")
    return (
        f"trace capture records {' and '.join(recorded)}; {layout.bytes_per_token()} bytes per "
        f"token; rows go to {config.bridge}"
    )


def _listed(layers: Iterable[int]) -> str:
    """Return ascending layers as `--trace-layers` takes them, such as "0,3,5-7"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
