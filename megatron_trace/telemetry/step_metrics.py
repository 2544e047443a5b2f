"""One step's figures under fixed names, for a log line, TensorBoard, wandb or Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from bridge.layout import Site
from megatron_trace.telemetry.log_prob_gap import GapSummary
from megatron_trace.telemetry.report import Report, SiteCount

log = logging.getLogger(__name__)

PREFIX = "trace"


class SummaryWriter(Protocol):
    """What TensorBoard's writer offers, as far as it is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Take one figure of one step."""
        ...


class Run(Protocol):
    """What a wandb run offers, as far as it is used here."""

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Take the figures of one step."""
        ...


def step_metrics(report: Report, gap: GapSummary | None = None) -> dict[str, float]:
    """Return a step's figures by name; a share of nothing is left out.

    `trace/guided_share` is of the values that should have been guided. Agreement is there where
    the records hold whole code words and `Guidance(compare=True)`: in all, by site
    (`trace/agreement/fc1`) and by site and layer (`trace/agreement/fc1/12`).
    """
    found = {f"{PREFIX}/{name}": value for name, value in _shares(report.total()).items()}
    for site in sorted({site for site, _ in report.counts} - {Site.ROUTES}):
        found |= _agreement(str(site), report.total([site]))
        for layer in sorted({at for where, at in report.counts if where is site}):
            found |= _agreement(f"{site}/{layer}", report.total([site], [layer]))
    routes = report.total([Site.ROUTES])
    if routes.agreement_nearest is not None:
        found[f"{PREFIX}/routes_chosen_alike"] = routes.agreement_nearest
    if gap is not None:
        found |= {f"{PREFIX}/log_prob_gap/{name}": value for name, value in gap.to_dict().items()}
    return found


def write_step(
    metrics: Mapping[str, float],
    step: int,
    *,
    tensorboard: SummaryWriter | None = None,
    wandb: Run | None = None,
    gauges: Any | None = None,
) -> None:
    """Send a step's figures to the log, and to what else the job has.

    Args:
        metrics: from `step_metrics`.
        step: the optimizer step.
        tensorboard: a `SummaryWriter`.
        wandb: a wandb run, or the module `wandb` after `wandb.init`.
        gauges: a `prometheus_client.Gauge` with the one label "name".
    """
    short = {name: value for name, value in metrics.items() if name.count("/") <= 2}
    log.info("step %d: %s", step, ", ".join(f"{k} {v:.6g}" for k, v in short.items()))
    if tensorboard is not None:
        for name, value in metrics.items():
            tensorboard.add_scalar(name, value, step)
    if wandb is not None:
        wandb.log(dict(metrics), step=step)
    if gauges is not None:
        for name, value in metrics.items():
            gauges.labels(name=name).set(value)


def _shares(total: SiteCount) -> dict[str, float]:
    wanted = total.guided + total.missing
    shares = {
        "guided_share": total.guided / wanted if wanted else None,
        "missing_share": total.missing / wanted if wanted else None,
        "agreement": total.agreement_used,
        "agreement_nearest": total.agreement_nearest,
        "adjacent_share": total.adjacent_share,
        "ambiguous_scale_share": total.ambiguous_share,
    }
    return {name: share for name, share in shares.items() if share is not None}


def _agreement(name: str, count: SiteCount) -> dict[str, float]:
    share = count.agreement_used
    return {} if share is None else {f"{PREFIX}/agreement/{name}": share}
