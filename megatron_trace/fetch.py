"""Fetching a micro-batch's records from a bridge."""

from __future__ import annotations

from collections.abc import Iterable

from bridge.client import TraceClient
from bridge.layout import Site
from bridge.records import TrajectoryRecords
from megatron_trace.guidance import Guidance


def fetch_records(
    client: TraceClient, trajectories: Iterable[str], guidance: Guidance | None = None
) -> list[TrajectoryRecords | None]:
    """Return the records of every trajectory, only the layers and sites that `guidance` names.

    Raises:
        UnknownTrajectory: if nothing is held under a name, unless `guidance.on_missing` is
            "round_to_nearest": then its entry is None.
    """
    guidance = guidance or Guidance()
    # Agreement is counted in the layers that are not guided too.
    layers, sites = (None, None) if guidance.compare else (guidance.layers, guidance.sites)
    if sites is not None and Site.FC2 in sites:
        sites = (*sites, Site.ROUTES)  # they say which expert a slot of fc2 belongs to
    found = client.fetch_all(
        trajectories,
        layers=layers,
        sites=sites,
        allow_unknown=guidance.on_missing != "error",
    )
    return list(found)
