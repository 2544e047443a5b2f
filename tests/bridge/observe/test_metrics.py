"""What a daemon says over HTTP is what it did."""

from __future__ import annotations

import re
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from bridge.cli.app import app
from bridge.client.client import TraceClient
from bridge.errors import UnknownTrajectory
from bridge.layout import Part, RecordLayout
from bridge.observe.http import InvalidHttpAddress, checked_address
from bridge.producer.producer import RecordProducer
from tests.bridge.observe.observed import Observed, observed_daemon

MakeRows = Callable[..., NDArray[np.uint8]]
Values = dict[tuple[str, ...], float]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Observed]:
    options = ["--dir", str(tmp_path / "store"), "--disk-limit", "64MiB", "--expire", "1"]
    with observed_daemon(tmp_path / "log", *options, "--memory-limit", "32MiB") as started:
        yield started


def _values(text: str) -> Values:
    """(name, label values) -> value of every sample."""
    return {
        (sample.name.removeprefix("trace_bridge_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_rows_bytes_messages_and_trajectories_exactly(
    daemon: Observed, layout: RecordLayout, make_rows: MakeRows
) -> None:
    width = {part: layout.row_bytes(part) for part in Part}
    with (
        RecordProducer(daemon.endpoint) as engine,
        RecordProducer(daemon.endpoint) as other,
        TraceClient(daemon.endpoint) as trainer,
    ):
        engine.register("engine", layout)
        other.register("other", layout)
        for part, count in ((Part.FORWARD, 50), (Part.KV, 40)):
            engine.send_rows(part, range(count), make_rows(part, range(count)), "v")
        engine.send_trajectory("done", 0, range(50), range(50), "finished")
        engine.send_trajectory("never finishes", 0, range(3), range(3), "open")
        engine.send_trajectory("stopped", 0, range(3), range(3), "open")
        engine.send_trajectory("stopped", 0, range(3), range(3), "aborted")
        other.count_dropped(Part.KV, 7)
        for producer in (engine, other):
            producer.flush()
        trainer.fetch("done")
        for _ in range(2):
            with suppress(UnknownTrajectory):
                trainer.fetch("nobody's")
        trainer.begin_step(3)
        daemon.status_when(lambda status: status.held.step == 3 and status.held.collected == 1)
    values = _values(daemon.get("metrics"))
    expected: Values = {
        ("held_rows", "forward"): 50,
        ("held_rows", "kv"): 40,
        ("received_rows_total", "forward"): 50,
        ("received_rows_total", "kv"): 40,
        ("received_bytes_total", "forward"): 50 * width[Part.FORWARD],
        ("received_bytes_total", "kv"): 40 * width[Part.KV],
        ("sent_rows_total", "forward"): 50,
        ("sent_rows_total", "kv"): 40,
        ("sent_bytes_total", "forward"): 50 * width[Part.FORWARD],
        ("sent_bytes_total", "kv"): 40 * width[Part.KV],
        ("unacknowledged_rows",): 0,
        ("unacknowledged_bytes",): 0,
        ("unacknowledged_oldest_seconds",): 0,
        ("ack_latency_seconds_count",): 10,
        ("messages_total",): 10,
        ("refused_messages_total", "UnknownTrajectory"): 2,
        ("dropped_rows_total", "engine"): 0,
        ("dropped_rows_total", "other"): 7,
        ("trajectories", "open"): 0,
        ("trajectories", "finished"): 1,
        ("trajectories", "aborted"): 1,
        ("collected_trajectories_total", "open"): 1,
        ("tier_limit_bytes", "memory"): 32 << 20,
        ("tier_limit_bytes", "disk"): 64 << 20,
        ("store_full",): 0,
        ("step",): 3,
    }
    assert {key: values[key] for key in expected} == expected
    assert values["ack_latency_seconds_bucket", "+Inf"] == 10
    assert values["tier_bytes", "disk"] > 90 * min(width.values())
    assert values["tier_bytes", "memory"] > 0
    assert 0 <= values["status_age_seconds",] < 30
    seen = values["engine_last_seen_timestamp_seconds", "engine"]
    assert 0 <= values["process_start_time_seconds",] - 1 < seen


def test_a_full_store_is_seen_and_its_refusals_are_counted(
    tmp_path: Path, layout: RecordLayout
) -> None:
    rows = np.zeros((4000, layout.row_bytes(Part.FORWARD)), dtype=np.uint8)
    with observed_daemon(
        tmp_path / "log",
        "--memory-limit",
        "64KiB",
        "--spill",
        str(tmp_path),
        "--disk-limit",
        "1MiB",
    ) as daemon:
        engine = RecordProducer(daemon.endpoint, resend_after_s=0.1)
        engine.register("engine", layout)
        engine.send_rows(Part.FORWARD, range(len(rows)), rows, "v")
        status = daemon.status_when(lambda status: status.held.full == 1)
        assert status.refused["StoreFull"] >= 1
        assert _values(daemon.get("metrics"))["store_full",] == 1
        engine.close()


def test_metrics_are_valid_in_the_format_that_a_scraper_asks_for(daemon: Observed) -> None:
    accept = openmetrics.exposition.CONTENT_TYPE_LATEST
    modern = daemon.get("metrics", Accept=accept)
    assert list(openmetrics_parser.text_string_to_metric_families(modern))
    plain = daemon.get("metrics")
    assert "# EOF" in modern
    assert "# EOF" not in plain
    assert _values(plain)["step",] == 0


def test_every_metric_is_documented(daemon: Observed) -> None:
    documented = set(re.findall(r"`(trace_bridge_\w+)", _documentation()))
    served = {family.name for family in text_string_to_metric_families(daemon.get("metrics"))}
    ours = {name for name in served if name.startswith("trace_bridge")}
    assert {name.removesuffix("_total") for name in documented} == ours - {"trace_bridge"} | {
        "trace_bridge_info"
    }


def _documentation() -> str:
    return (Path(__file__).parents[3] / "docs" / "observability.md").read_text()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1", ""])
def test_a_website_that_points_its_name_here_reads_nothing(daemon: Observed, host: str) -> None:
    for path in ("", "metrics", "status.json"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            daemon.get(path, Host=host)


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:9", "[::1]:9"])
def test_names_of_this_machine_are_answered(daemon: Observed, host: str) -> None:
    assert daemon.get("", Host=host).startswith("<!doctype html>")


def test_other_paths_are_not_there(daemon: Observed) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        daemon.get("../../etc/passwd")


@pytest.mark.parametrize(
    "address", ["0.0.0.0:80", "10.0.0.1:80", "[::]:80", "example.com:80", "*:80", ":80"]
)
def test_only_loopback_addresses_are_served(address: str) -> None:
    with pytest.raises(InvalidHttpAddress, match=r"127\.0\.0\.1:PORT"):
        checked_address(address)


def test_addresses_are_read_as_people_write_them() -> None:
    assert checked_address("localhost:0") == ("127.0.0.1", 0)
    assert checked_address("127.0.0.1:65535") == ("127.0.0.1", 65535)
    assert checked_address("[::1]:8080") == ("::1", 8080)
    for address in ("127.0.0.1", "127.0.0.1:65536", "8080", "http://127.0.0.1:8080"):
        with pytest.raises(InvalidHttpAddress, match="write it as"):
            checked_address(address)


def test_an_occupied_port_ends_in_one_sentence(daemon: Observed) -> None:
    address = daemon.url.removeprefix("http://").rstrip("/")
    result: Any = CliRunner().invoke(
        app, ["serve", "--endpoint", "tcp://127.0.0.1:0", "--http", address]
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(r"error: cannot serve the status page .* with --http\n", result.stderr)
