"""A step's figures have fixed names and go wherever the job writes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from bridge.layout import Site
from megatron_trace.telemetry.log_prob_gap import GapSummary
from megatron_trace.telemetry.report import Report, SiteCount
from megatron_trace.telemetry.step_metrics import step_metrics, write_step

REPORT = Report(
    {
        (Site.FC1, 1): SiteCount(
            guided=60, missing=20, compared=60, agree_used=57, agree_nearest=45, adjacent_nearest=12
        ),
        (Site.K, 1): SiteCount(guided=20, read_scales=8, ambiguous_scales=2),
        (Site.ROUTES, 1): SiteCount(compared=10, agree_used=10, agree_nearest=9),
    }
)
GAP = GapSummary(0.01, 0.1, 0.5, 0.002, 12)


def test_names_and_values() -> None:
    assert step_metrics(REPORT, GAP) == {
        "trace/guided_share": 0.8,
        "trace/missing_share": 0.2,
        "trace/agreement": 0.95,
        "trace/agreement_nearest": 0.75,
        "trace/adjacent_share": 0.8,
        "trace/ambiguous_scale_share": 0.25,
        "trace/agreement/fc1": 0.95,
        "trace/agreement/fc1/1": 0.95,
        "trace/routes_chosen_alike": 0.9,
        "trace/log_prob_gap/mean": 0.01,
        "trace/log_prob_gap/p99": 0.1,
        "trace/log_prob_gap/max": 0.5,
        "trace/log_prob_gap/k3_kl": 0.002,
        "trace/log_prob_gap/tokens": 12,
    }


def test_nothing_is_said_of_what_was_not_counted() -> None:
    assert step_metrics(Report({})) == {}


def test_every_receiver_gets_every_figure(caplog: pytest.LogCaptureFixture) -> None:
    written: dict[str, Any] = {}

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            written.setdefault("tensorboard", {})[tag] = (scalar_value, global_step)

    class Run:
        def log(self, data: Any, step: int) -> None:
            written["wandb"] = (data, step)

    registry = CollectorRegistry()
    gauges = Gauge("trace_step", "figures", ["name"], registry=registry)
    metrics = step_metrics(REPORT, GAP)
    with caplog.at_level(logging.INFO):
        write_step(metrics, 7, tensorboard=Writer(), wandb=Run(), gauges=gauges)
    assert written["tensorboard"] == {name: (value, 7) for name, value in metrics.items()}
    assert written["wandb"] == (metrics, 7)
    label = {"name": "trace/log_prob_gap/k3_kl"}
    assert registry.get_sample_value("trace_step", label) == 0.002
    assert "step 7" in caplog.text
    assert "trace/guided_share 0.8" in caplog.text
    assert "fc1/1" not in caplog.text, "the log keeps to the sums"


def test_a_report_is_json_of_its_counts() -> None:
    found = REPORT.to_dict()
    assert found["total"]["guided"] == 80
    assert found["sites"][0] | {"site": "fc1", "layer": 1, "guided": 60} == found["sites"][0]
    assert [each["site"] for each in found["sites"]] == ["fc1", "k", "routes"]
