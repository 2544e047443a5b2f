"""Pages of the store's files do not stay in the daemon's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.daemon.memory.mapped import MappedFiles
from bridge.daemon.spawn import EmbeddedBridge
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer

MIB = 1 << 20
ROWS = 700_000


def _mapped(bridge: EmbeddedBridge) -> int:
    lines = Path(f"/proc/{bridge.process.pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


@pytest.mark.parametrize("tier", ["disk", "scratch"])
def test_reading_far_more_than_memory_holds_leaves_no_file_in_it(
    tmp_path: Path,
    start_process: Callable[..., EmbeddedBridge],
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    tier: str,
) -> None:
    place = {"directory": tmp_path} if tier == "disk" else {"spill": tmp_path}
    bridge = start_process(**place, memory_limit="32MiB", disk_limit="128MiB")
    before = _mapped(bridge)
    payload = np.repeat(make_rows(Part.FORWARD, range(100)), ROWS // 100, axis=0)
    assert payload.nbytes > 24 * MIB
    with RecordProducer(bridge.endpoint) as engine, TraceClient(bridge.endpoint) as trainer:
        engine.register("e", layout)
        engine.send_rows(Part.FORWARD, range(ROWS), payload, "v")
        engine.send_trajectory("t", 0, np.zeros(ROWS, np.int32), range(ROWS), "finished")
        engine.flush()
        for _ in range(2):
            records = trainer.fetch("t", stop=ROWS // 2)
            np.testing.assert_array_equal(records.forward, payload[: ROWS // 2])
            end = time.monotonic() + 30
            while _mapped(bridge) - before > 4 * MIB:
                assert time.monotonic() < end
                trainer.ping()


def test_what_is_under_the_bound_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[None] = []
    shared = [100]
    monkeypatch.setattr("bridge.daemon.memory.mapped._shared_bytes", lambda: shared[0])
    monkeypatch.setattr("bridge.daemon.memory.mapped.release_pages", lambda: released.append(None))
    monkeypatch.setattr("bridge.daemon.memory.mapped._PERIOD_S", 0.0)
    files = MappedFiles(10)
    for more, lent in ((10, 0), (15, 5), (30, 20)):
        shared[0] = 100 + more
        files.tick(lent)
    assert released == []
    shared[0] = 116
    files.tick(5)
    assert released == [None]
