"""The command line: one sentence for every mistake, a clean stop, a table of what is held."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from bridge.cli.app import app
from bridge.cli.units import InvalidSize, format_size, parse_size
from bridge.client.client import TraceClient
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import BridgeUnreachable
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.store import DiskStore


def _error(*arguments: str) -> str:
    """Run a command that must fail; return its one sentence."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def filled(
    tmp_path: Path,
    start_process: Callable[..., EmbeddedBridge],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> EmbeddedBridge:
    """A daemon on disk with trajectory "t" of four tokens."""
    bridge = start_process(tmp_path / "store", disk_limit="64MiB")
    with RecordProducer(bridge.endpoint) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(3), make_rows(Part.FORWARD, range(3)), "v1")
        producer.send_trajectory("t", 0, range(4), [0, 1, 2, -1], "finished")
    return bridge


def test_a_daemon_is_inspected_alive_and_its_directory_after_a_clean_stop(
    filled: EmbeddedBridge, tmp_path: Path, layout: RecordLayout
) -> None:
    store = str(tmp_path / "store")
    run = CliRunner().invoke
    alive = json.loads(run(app, ["inspect", "--endpoint", filled.endpoint, "--json"]).stdout)
    while_served = json.loads(run(app, ["inspect", "--dir", store, "--json"]).stdout)
    assert "another bridge daemon" in _error(
        "serve", "--dir", store, "--endpoint", "tcp://127.0.0.1:0"
    )
    assert "choose another port" in _error("serve", "--endpoint", filled.endpoint)
    table = run(app, ["inspect", "--endpoint", filled.endpoint], env={"COLUMNS": "140"}).stdout

    filled.stop()
    assert filled.process.returncode == 0
    stopped = json.loads(run(app, ["inspect", "--dir", store, "--json"]).stdout)

    assert alive["totals"] == {
        "tokens": 4,
        "rows": 3,
        "missing_forward": 0,
        "missing_kv": 3,
        "nbytes": 3 * layout.row_bytes(Part.FORWARD),
    }
    assert alive["trajectories"] == while_served["trajectories"] == stopped["trajectories"]
    assert alive["disk_limit"] == 64 << 20
    assert alive["disk_bytes"] == stopped["disk_bytes"] > 0
    assert all(word in table for word in ("trajectory", "finished", "1 trajectories", "v1", "64.0"))
    none = json.loads(run(app, ["inspect", "--dir", store, "--json", "other"]).stdout)
    assert none["trajectories"] == []


def test_a_daemon_ends_with_the_process_that_embedded_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _EMBED], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    endpoint, pid = parent.stdout.readline().decode().split()
    with TraceClient(endpoint) as client:
        client.ping()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 30
    while _alive(int(pid)):
        assert time.monotonic() < end, "the daemon outlived its parent"
        time.sleep(0.05)


_EMBED = """
import time
from bridge.daemon import spawn
bridge = spawn.start()
print(bridge.endpoint, bridge.process.pid, flush=True)
time.sleep(60)
"""


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_embedded_daemon_that_cannot_start_says_so(
    start_process: Callable[..., EmbeddedBridge], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BridgeUnreachable, match="python -m bridge serve --endpoint"):
        start_process(endpoint="tcp://10.0.0.1:5601")
    assert "error: tcp://10.0.0.1:5601 is not a loopback address" in capfd.readouterr().err


def test_bad_arguments_end_in_one_sentence_that_names_the_fix(tmp_path: Path) -> None:
    port = "tcp://127.0.0.1:0"
    assert "--insecure" in _error("serve", "--endpoint", "tcp://0.0.0.0:5601")
    assert "write it as tcp" in _error("serve", "--endpoint", "nowhere")
    assert "write it as 64GiB" in _error("serve", "--endpoint", port, "--memory-limit", "much")
    assert "write it as 64GiB" in _error(
        "serve", "--endpoint", port, "--dir", str(tmp_path), "--disk-limit", "0"
    )


def test_a_store_of_another_schema_or_a_broken_one_ends_in_one_sentence(tmp_path: Path) -> None:
    DiskStore(tmp_path / "old", 1 << 20).close()
    environment = lmdb.open(str(tmp_path / "old"), max_dbs=4)
    with environment.begin(environment.open_db(b"about"), write=True) as txn:
        txn.put(b"schema", b"0")
    environment.close()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "data.mdb").write_bytes(b"not a store" * 1000)
    for command in (["serve", "--endpoint", "tcp://127.0.0.1:0"], ["inspect"]):
        assert "has schema 0" in _error(*command, "--dir", str(tmp_path / "old"))
        assert "not readable" in _error(*command, "--dir", str(tmp_path / "broken"))


def test_help_shows_every_option() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"}).stdout
    options = ("--endpoint", "--dir", "--disk-limit", "--memory-limit", "--log-level", "--spill")
    options += ("--keep", "--max-version-diff", "--expire", "--parent", "--http", "--log-format")
    options += ("--keys", "--insecure")
    assert all(option in shown for option in options)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1", 1), ("64GiB", 64 << 30), ("2 KiB", 2048), (" 3TiB ", 3 << 40)]
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1GB", "1.5GiB", "GiB"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(InvalidSize):
        parse_size(text)


def test_sizes_are_written_with_their_unit() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 TiB",
    ]
