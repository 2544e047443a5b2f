"""The daemon's log: events with stable names and fields, one JSON object a line, or text."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import zmq
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.layout import Part, RecordLayout
from bridge.observe.logs import Event, JsonLines, event
from bridge.producer.producer import RecordProducer
from bridge.store.directory import CHECKPOINT_FILE
from bridge.wire import Policy
from tests.bridge.observe.observed import Observed, observed_daemon

JSON = ["--log-format", "json", "--log-level", "info"]


def _tell_everything(daemon: Observed, layout: RecordLayout, rows: NDArray[np.uint8]) -> None:
    with RecordProducer(daemon.endpoint) as engine, TraceClient(daemon.endpoint) as trainer:
        engine.register("engine", layout)
        engine.send_rows(Part.FORWARD, range(len(rows)), rows, "v")
        engine.send_trajectory("t", 0, range(len(rows)), range(len(rows)), "finished")
        engine.count_dropped(Part.KV, 7)
        engine.flush()
        trainer.begin_step(5)
        trainer.gc(Policy(keep=1))
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(daemon.endpoint)
    stranger.send(b"noise")
    assert stranger.poll(30_000)
    context.destroy(linger=0)


def _named(log: list[dict[str, Any]], name: Event) -> dict[str, Any]:
    (found,) = [line for line in log if line["event"] == name]
    return found


def test_a_daemons_life_as_json_lines(
    tmp_path: Path, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    with observed_daemon(tmp_path / "log", *JSON) as daemon:
        _tell_everything(daemon, layout, make_rows(Part.FORWARD, range(3)))
        daemon.stop()
    log = daemon.log()
    for line in log:
        assert {"time", "level", "event", "logger", "message"} <= line.keys()
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
        assert line["event"] in set(Event)
    ready = _named(log, Event.DAEMON_READY)
    assert (ready["endpoint"], ready["http"]) == (daemon.endpoint, daemon.url)
    assert _named(log, Event.ENGINE_JOINED)["engine"] == "engine"
    dropped = _named(log, Event.ROWS_DROPPED)
    assert (dropped["engine"], dropped["forward_rows"], dropped["kv_rows"]) == ("engine", 0, 7)
    assert dropped["level"] == "warning"
    collected = _named(log, Event.RECORDS_COLLECTED)
    assert (collected["trajectories"], collected["rows"], collected["step"]) == (1, 3, 5)
    assert _named(log, Event.MESSAGE_REFUSED)["code"] == "CorruptMessage"
    assert (log[0]["event"], log[-1]["event"]) == (Event.DAEMON_READY, Event.DAEMON_STOPPED)


def test_by_default_a_daemon_logs_warnings_as_text(
    tmp_path: Path, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    with observed_daemon(tmp_path / "log") as daemon:
        _tell_everything(daemon, layout, make_rows(Part.FORWARD, range(3)))
        daemon.stop()
    lines = daemon.stderr.read_text().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(
        r"[-\d]+ [\d:,]+ WARNING bridge\.daemon\.ingest: engine engine has dropped 0 forward "
        r"and 7 K/V rows so far",
        lines[0],
    )
    assert "the daemon refuses a message: this is not a bridge message" in lines[1]


def test_a_full_store_is_told_when_it_begins_and_when_it_ends(
    tmp_path: Path, layout: RecordLayout
) -> None:
    rows = np.zeros((1000, layout.row_bytes(Part.FORWARD)), dtype=np.uint8)
    limits = ["--memory-limit", "512KiB", "--spill", str(tmp_path), "--disk-limit", "1MiB"]
    with observed_daemon(tmp_path / "log", *JSON, *limits) as daemon:
        with (
            RecordProducer(daemon.endpoint, resend_after_s=0.05) as engine,
            TraceClient(daemon.endpoint) as trainer,
        ):
            engine.register("engine", layout)
            first = 0
            while not trainer.stats().full:
                engine.send_rows(Part.FORWARD, range(first, first + len(rows)), rows, "v")
                first += len(rows)
            while trainer.stats().refused < 3:
                engine.poll()
            trainer.begin_step(1)
            trainer.gc(Policy(keep=1))
            engine.flush()
        daemon.stop()
    turns = {Event.STORE_FULL, Event.STORE_HAS_ROOM}
    told = [line["event"] for line in daemon.log() if line["event"] in turns]
    assert told
    assert told == [Event.STORE_FULL, Event.STORE_HAS_ROOM] * (len(told) // 2)


def test_damage_found_in_a_store_is_told_by_entry_and_row(
    tmp_path: Path, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    store = ["--dir", str(tmp_path / "store"), "--disk-limit", "4MiB"]
    with observed_daemon(tmp_path / "log", *JSON, *store) as daemon:
        with RecordProducer(daemon.endpoint) as engine:
            engine.register("engine", layout)
            engine.send_rows(Part.FORWARD, range(3), make_rows(Part.FORWARD, range(3)), "v")
            engine.send_trajectory("t", 0, range(3), range(3), "finished")
            engine.send_digests("v", {"w": "00"})
        daemon.stop()
    width = layout.row_bytes(Part.FORWARD)
    environment = lmdb.open(str(tmp_path / "store"), max_dbs=4)
    with environment.begin(write=True) as txn:
        payloads = environment.open_db(b"payload", txn=txn)
        ((key, payload),) = list(txn.cursor(payloads))
        spoiled = bytearray(payload)
        spoiled[width] ^= 1
        txn.put(key, bytes(spoiled), db=payloads)
        journal = environment.open_db(b"journal", txn=txn)
        last, _ = list(txn.cursor(journal))[-1]
        txn.put(last, b"spoiled", db=journal)
    environment.close()
    (tmp_path / "store" / CHECKPOINT_FILE).unlink()  # with it nobody reads the journal's beginning
    with observed_daemon(tmp_path / "log2", *JSON, *store) as daemon:
        with TraceClient(daemon.endpoint) as trainer:
            assert trainer.fetch("t").forward_valid.tolist() == [True, False, True]
        daemon.stop()
    log = daemon.log()
    damaged = _named(log, Event.ROW_DAMAGED)
    assert (damaged["entry"], damaged["row"]) == (int.from_bytes(key), 1)
    assert _named(log, Event.ENTRY_DAMAGED)["entry"] == int.from_bytes(last)


def test_an_exception_and_odd_texts_stay_within_their_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        caught = sys.exc_info()
    record = logging.LogRecord("n", logging.ERROR, "", 0, "a\n%s", ('"b"\u2028',), caught)
    line = JsonLines().format(record)
    assert len(line.splitlines()) == 1
    told = json.loads(line)
    assert (told["event"], told["message"]) == (Event.OTHER, 'a\n"b"\u2028')
    assert "ValueError: two\nlines" in told["traceback"]


def test_every_event_is_documented() -> None:
    documentation = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    assert all(f"`{name}`" in documentation for name in Event)


def test_no_field_of_an_event_hides_what_every_line_has() -> None:
    record = logging.makeLogRecord({"msg": "text", **event(Event.OTHER, engine="e")})
    assert json.loads(JsonLines().format(record))["message"] == "text"
