"""The dashboard and the alert rules read only metrics that a daemon serves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from tests.bridge.observe.observed import observed_daemon

MONITORING = Path(__file__).parents[3] / "monitoring"
_METRIC = re.compile(r"\b(?:trace_bridge|process)_\w+")
_MATCHER = re.compile(r"\b(trace_bridge_\w+)\{([^}]*)\}")


def _panels() -> list[dict[str, Any]]:
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    assert isinstance(panels, list)
    return panels


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _expressions() -> dict[str, str]:
    panels = {
        f"{panel['title']}/{target['refId']}": target["expr"]
        for panel in _panels()
        for target in panel["targets"]
    }
    return panels | {rule["alert"]: rule["expr"] for rule in _rules()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, layout: RecordLayout) -> dict[str, set[str]]:
    """Metric name -> label names, of a daemon that an engine has registered with."""
    with observed_daemon(tmp_path_factory.mktemp("daemon") / "log") as daemon:
        with RecordProducer(daemon.endpoint) as engine:
            engine.register("engine", layout)
            engine.count_dropped(Part.FORWARD, 1)
            engine.flush()
        daemon.status_when(lambda status: bool(status.engines))
        samples = [
            sample
            for family in text_string_to_metric_families(daemon.get("metrics"))
            for sample in family.samples
        ]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.parametrize(("name", "expression"), _expressions().items())
def test_every_metric_of_an_expression_is_served(
    name: str, expression: str, served: dict[str, set[str]]
) -> None:
    names = set(_METRIC.findall(expression))
    assert names, name
    # A counter of refusals by reason has no sample before the first refusal.
    assert names - {"trace_bridge_refused_messages_total"} <= served.keys()
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize(("name", "expression"), _expressions().items())
def test_every_label_that_an_expression_selects_is_served(
    name: str, expression: str, served: dict[str, set[str]]
) -> None:
    known = {metric: labels | {"instance"} for metric, labels in served.items()}
    known["trace_bridge_refused_messages_total"] = {"instance", "reason"}
    for metric, matchers in _MATCHER.findall(expression):
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= known[metric], name


def test_panels_have_a_title_a_description_and_a_place_of_their_own() -> None:
    covered: set[tuple[int, int]] = set()
    for panel in _panels():
        assert panel["title"]
        assert panel["description"]
        box = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not covered & cells, f"{panel['title']} overlaps another panel"
        assert max(x for x, _ in cells) < 24
        covered |= cells


def test_rules_have_a_severity_and_a_summary() -> None:
    rules = _rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
