"""Names of strangers where people see them."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bridge.errors import TraceError
from bridge.layout import Part, RecordLayout
from bridge.observe.logs import TextLines
from bridge.observe.metrics import _label
from bridge.plain import plain
from bridge.producer.producer import RecordProducer
from bridge.wire import Error
from bridge.wire.refusal import exception, refusal
from tests.bridge.observe.observed import Observed, observed_daemon

HOSTILE = 'e\x1b]0;owned\x07\n\r\x9b31m\u202e[red]"{\\\u2066\u200f\u2028\x00'
NAMES = st.text(max_size=30)


def _is_safe(text: str) -> bool:
    return all(unicodedata.category(char)[0] not in "CZ" or char == " " for char in text)


@given(NAMES)
def test_nothing_that_a_terminal_obeys_is_left_and_other_text_is_as_it_was(name: str) -> None:
    assert _is_safe(plain(name))
    assert plain(name) == name or not name.isprintable()
    assert plain(plain(name)) == plain(name)


@given(NAMES, NAMES)
def test_labels_of_two_names_differ(one: str, other: str) -> None:
    assert _is_safe(_label(one))
    assert (_label(one) == _label(other)) == (one == other)


@given(st.text(max_size=5000))
def test_sentences_are_safe_on_both_sides(sentence: str) -> None:
    assert _is_safe(refusal(TraceError(sentence)).text)
    assert _is_safe(str(exception(Error("StoreFull", sentence))))


def test_a_log_line_stays_one_line() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "engine %s", (HOSTILE,), None)
    line = TextLines("%(levelname)s %(message)s").format(record)
    assert line.startswith("WARNING engine e\\x1b]0;owned\\x07\\n")
    assert _is_safe(line)


@pytest.fixture
def daemon(tmp_path: Path, layout: RecordLayout) -> Iterator[Observed]:
    with observed_daemon(tmp_path / "log") as started:
        with RecordProducer(started.endpoint) as engine:
            engine.register(HOSTILE, layout)
            engine.send_trajectory(HOSTILE, 0, [1], [-1], "open")
            engine.count_dropped(Part.FORWARD, 3)
        yield started


@pytest.mark.parametrize("command", ["inspect", "top --once"])
def test_what_is_printed_is_safe_for_a_terminal(daemon: Observed, command: str) -> None:
    asked = [sys.executable, "-m", "bridge", *command.split(), "--endpoint", daemon.endpoint]
    shown = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    assert all(_is_safe(line) for line in shown.split("\n"))
    assert re.search(r"e(\?|\\x1b)\]", shown)
    as_json = [*asked, "--json"]
    listed = subprocess.run(as_json, capture_output=True, text=True, check=True, timeout=60).stdout
    assert all(_is_safe(line.replace(" ", "")) for line in listed.split("\n"))
    assert json.dumps(HOSTILE) in listed


def test_metrics_of_any_engine_are_valid(daemon: Observed) -> None:
    daemon.status_when(lambda status: status.held.dropped_rows == 3)
    families = {
        family.name: family for family in text_string_to_metric_families(daemon.get("metrics"))
    }
    (sample,) = families["trace_bridge_dropped_rows"].samples
    assert (sample.labels, sample.value) == ({"engine": _label(HOSTILE)}, 3)
