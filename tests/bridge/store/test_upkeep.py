"""A store can be copied while it is served, checked, and made smaller."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.daemon.spawn import EmbeddedBridge
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.store import DiskStore, Entry

LIMIT = 64 << 20
MakeRows = Callable[..., NDArray[np.uint8]]


def _bridge(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bridge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_copy_of_a_store_that_is_written_to_has_all_that_was_acknowledged_before(
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: MakeRows,
    start_process: Callable[..., EmbeddedBridge],
) -> None:
    bridge = start_process(tmp_path / "store")
    stop = threading.Event()
    with RecordProducer(bridge.endpoint) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(300), make_rows(Part.FORWARD, range(300)), "v")
        producer.send_trajectory("t", 0, range(300), range(300), "finished")
        producer.flush()

        def write_on() -> None:
            row = 1000
            while not stop.is_set():
                producer.send_rows(Part.FORWARD, [row], make_rows(Part.FORWARD, [row]), "v")
                row += 1

        writing = threading.Thread(target=write_on)
        writing.start()
        try:
            done = _bridge("backup", tmp_path / "store", tmp_path / "copy", "--json")
        finally:
            stop.set()
            writing.join()
    assert done.stderr == ""
    assert done.returncode == 0
    assert json.loads(done.stdout)["nbytes"] == (tmp_path / "copy" / "data.mdb").stat().st_size
    assert stat.S_IMODE((tmp_path / "copy" / "data.mdb").stat().st_mode) == 0o600
    checked = _bridge("verify", tmp_path / "copy", "--json")
    assert checked.returncode == 0, checked.stderr
    found = json.loads(checked.stdout)
    assert found["whole"]
    assert found["rows"] >= 300
    assert found["indexed_rows"] == found["rows"]
    copy = start_process(tmp_path / "copy")
    with TraceClient(copy.endpoint) as client:
        records = client.fetch("t")
        np.testing.assert_array_equal(records.forward, make_rows(Part.FORWARD, range(300)))


def test_a_damaged_row_and_a_lost_payload_are_found(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    rows = np.arange(100 * 50, dtype=np.uint16).view(np.uint8)
    store.append([Entry(b"no message", rows.data, 100) for _ in range(3)])
    with store._env.writing() as txn:
        txn.delete((1).to_bytes(8, "big"), db=store._env.table(b"payload"))
    store.close()
    content = bytearray((tmp_path / "data.mdb").read_bytes())
    content[content.find(rows[4200:4230].tobytes())] ^= 4
    (tmp_path / "data.mdb").write_bytes(content)
    checked = _bridge("verify", tmp_path, "--json")
    found = json.loads(checked.stdout)
    assert checked.returncode == 1
    assert (found["damaged_rows"], found["lost_payloads"], found["damaged_entries"]) == (1, 1, 3)
    assert not found["whole"]
    sentence = _bridge("verify", tmp_path).stdout
    assert "1 rows, 1 payloads and 3 messages are damaged; checkpoint: none" in sentence


def test_a_file_is_made_smaller_and_holds_what_it_held(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    numbers = store.append([Entry(b"rows", bytes([n]) * 100_000, 100) for n in range(20)])
    store.delete(numbers[:18])
    served = _bridge("compact", tmp_path)
    assert served.returncode == 1
    assert "another bridge daemon serves" in served.stderr
    store.close()
    done = _bridge("compact", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["nbytes"] == (tmp_path / "data.mdb").stat().st_size < told["was"] // 4
    store = DiskStore(tmp_path, LIMIT)
    assert [number for number, _ in store.replay()] == numbers[18:]
    with store.reader() as read:
        held = [read(number) for number in numbers[18:]]
        assert [bytes(one.payload) for one in held if one] == [b"\x12" * 100_000, b"\x13" * 100_000]
    assert store.append([Entry(b"more")]) == [20]
    store.close()


@pytest.mark.parametrize(
    "command", [["backup", "gone", "copy"], ["verify", "gone"], ["compact", "gone"]]
)
def test_what_is_no_store_is_said_in_one_sentence(tmp_path: Path, command: list[str]) -> None:
    done = _bridge(command[0], *(tmp_path / name for name in command[1:]))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "gone").exists()


def test_a_copy_replaces_nothing(tmp_path: Path) -> None:
    DiskStore(tmp_path / "store", LIMIT).close()
    DiskStore(tmp_path / "copy", LIMIT).close()
    done = _bridge("backup", tmp_path / "store", tmp_path / "copy")
    assert done.returncode == 1
    assert "is not empty; choose a new directory" in done.stderr
