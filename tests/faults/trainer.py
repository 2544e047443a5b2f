"""The trainer's side of the fault table: a process that fetches and compares until told to stop."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.client.client import TraceClient
from bridge.errors import BridgeUnreachable, CorruptMessage
from tests.faults.expected import Expected
from tests.faults.verifier import compare


@dataclass(frozen=True, slots=True)
class Reading:
    """What a trainer fetches, again and again.

    ``fetches`` are made, or with None as many as come before ``stop`` exists. ``report`` is renewed
    after every fetch. It rests ``rest_s`` before the first one.
    """

    endpoint: str
    expected: Expected
    report: Path
    seed: int
    fetches: int | None = None
    timeout_s: float = 5.0
    rest_s: float = 0.0

    @property
    def stop(self) -> Path:
        return self.report.with_suffix(".stop")


def run(reading: Reading) -> None:
    """Fetch random ranges; an answer may be late, refused as damaged or right, but not wrong.

    Rows come through the socket if the seed is odd, else through memory that is lent.
    """
    rng, done = np.random.default_rng(reading.seed), Counter({"asked": 0, "wrong": 0})
    _write(reading, done)
    with TraceClient(reading.endpoint, timeout_s=reading.timeout_s) as client:
        if reading.seed % 2:
            _lend_no_memory(client)
        while not reading.stop.exists() and done["fetched"] != reading.fetches:
            start = int(rng.integers(0, reading.expected.rows))
            done["asked"] += 1
            _write(reading, done)
            try:
                records = client.fetch(reading.expected.whole, start=start)
            except (BridgeUnreachable, CorruptMessage) as error:
                done[type(error).__name__] += 1
            else:
                compared, wrong = compare(records, reading.expected)
                done.update(fetched=1, compared=compared, wrong=wrong)
            _write(reading, done)


def _lend_no_memory(client: TraceClient) -> None:
    for connection in client._connections:
        connection._shm_receiver = None


def reported(reading: Reading) -> Counter[str]:
    """Return what a trainer has counted so far: asked, fetched, compared, wrong and its errors."""
    if not reading.report.exists():
        return Counter()
    return Counter(json.loads(reading.report.read_text()))


def _write(reading: Reading, done: Counter[str]) -> None:
    draft = reading.report.with_suffix(".draft")
    draft.write_text(json.dumps(done))
    draft.replace(reading.report)
