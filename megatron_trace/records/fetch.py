"""Fetching a micro-batch's records from a bridge."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bridge.client.client import TraceClient
from bridge.client.records import TrajectoryRecords
from bridge.layout import Site, TensorSlice
from bridge.layout.tensor_slice import ALL_VALUES
from megatron_trace.records.guidance import Guidance

if TYPE_CHECKING:
    from torch import nn

    from megatron_trace.layers.key_values import KeyValues

LATE_ROWS_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.05


def fetch_records(
    client: TraceClient,
    trajectories: Iterable[str],
    guidance: Guidance | None = None,
    model: nn.Module | Sequence[nn.Module] | None = None,
) -> list[TrajectoryRecords | None]:
    """Return the records of every trajectory, only the layers and sites that `guidance` names.

    Reported rows that are not there yet are waited for, a moment, if a gap would be an error: the
    rollout's ranks and several bridges do not wait for each other.

    With `model`, which `enable_fp4` has marked, a tensor-parallel rank gets of K and V its own
    heads alone. All else it gets whole: the inputs of fc1 and the routes are the same on every
    rank, and fc2's records travel on to the ranks that hold the experts.

    Raises:
        UnknownTrajectory: if nothing is held under a name, unless `guidance.on_missing` is
            "round_to_nearest": then its entry is None.
    """
    guidance = guidance or Guidance()
    # Agreement is counted in the layers that are not guided too.
    layers, sites = (None, None) if guidance.compare else (guidance.layers, guidance.sites)
    if sites is not None and Site.FC2 in sites:
        sites = (*sites, Site.ROUTES)  # they say which expert a slot of fc2 belongs to
    strict = guidance.on_missing == "error"
    fetch = partial(
        client.fetch_all,
        layers=layers,
        sites=sites,
        tensor_slice=ALL_VALUES if model is None else _slice_of(model),
        allow_unknown=not strict,
    )
    names = list(trajectories)
    found = list(fetch(names))
    end = time.monotonic() + LATE_ROWS_TIMEOUT_S
    while strict and (late := _late(found)) and time.monotonic() < end:
        time.sleep(POLL_INTERVAL_S)
        for at, records in zip(late, fetch([names[at] for at in late]), strict=True):
            found[at] = records
    return found


def _late(found: list[TrajectoryRecords | None]) -> list[int]:
    """Return which of the trajectories lack rows."""
    return [
        at for at, records in enumerate(found) if records is not None and records.missing().any()
    ]


def _slice_of(model: nn.Module | Sequence[nn.Module]) -> TensorSlice:
    """Return what of K and V this rank computes, the same in every layer."""
    chunks: Sequence[nn.Module] = model if isinstance(model, Sequence) else (model,)
    for chunk in chunks:
        for module in chunk.modules():
            mark: KeyValues | None = module.__dict__.get("trace_key_value")
            if mark is not None:
                return mark.tensor_slice
    return ALL_VALUES
