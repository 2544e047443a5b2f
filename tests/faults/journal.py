"""What an engine was promised, in a file that outlives the engine.

A line a message: when it is first sent, and when its acknowledgement is read, before anything else
is done with it. The last line may be half written.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.layout import Part
from bridge.wire import Message, Rows, RowsInShm, Trajectory


class Journal:
    """Written by one engine process."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def send(self, seq: int, message: Message) -> None:
        """Note what a message says."""
        match message:
            case Rows(header=block) | RowsInShm(header=block):
                told = {"part": block.part.value, "rows": [int(row) for row in block.rows]}
            case Trajectory():
                told = {
                    "trajectory": message.trajectory,
                    "stop": message.start + len(message.tokens),
                    "state": message.state.value,
                    "first_row": int(message.rows[0]),
                }
            case _:
                told = {}
        self._write({"seq": seq, **told})

    def acknowledge(self, seqs: tuple[int, ...]) -> None:
        """Note what is acknowledged; on disk when this returns."""
        self._write({"acknowledged": seqs})
        os.fsync(self._descriptor)

    def mark(self, what: str) -> None:
        """Note an event, such as the sentence of an error."""
        self._write({"mark": what})

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Reported:
    """A trajectory message: positions [0, stop), the state and the row at position 0."""

    seq: int
    stop: int
    state: str
    first_row: int


@dataclass(slots=True)
class Promises:
    """What a journal says.

    Attributes:
        rows: part -> bool [n], the rows that are acknowledged.
        sent: trajectory -> all that was told of it, acknowledged or not.
        told: likewise, what is acknowledged.
        marks: events.
    """

    rows: dict[Part, NDArray[np.bool_]]
    sent: defaultdict[str, list[Reported]] = field(default_factory=lambda: defaultdict(list))
    told: defaultdict[str, list[Reported]] = field(default_factory=lambda: defaultdict(list))
    marks: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Rows acknowledged."""
        return int(sum(rows.sum() for rows in self.rows.values()))


def read(file: Path, rows: int, *, sent_after: str | None = None) -> Promises:
    """Read the journal of an engine of so many rows; with ``sent_after`` leave out the promises
    for what was first sent before that mark."""
    promises = _none(rows)
    sent: dict[int, dict[str, Any]] = {}
    for line in _lines(file):
        if "mark" in line:
            if line["mark"] == sent_after:
                promises, sent = _none(rows), {}
            promises.marks.append(line["mark"])
        elif "seq" in line:
            sent[line["seq"]] = line
            if "trajectory" in line:
                promises.sent[line["trajectory"]].append(_told(line))
        else:
            for seq in line["acknowledged"]:
                _promise(promises, sent.pop(seq, {}))
    return promises


def _none(rows: int) -> Promises:
    return Promises({part: np.zeros(rows, dtype=np.bool_) for part in Part})


def _promise(promises: Promises, line: dict[str, Any]) -> None:
    if "part" in line:
        promises.rows[Part(line["part"])][line["rows"]] = True
    elif "trajectory" in line:
        promises.told[line["trajectory"]].append(_told(line))


def _told(line: dict[str, Any]) -> Reported:
    return Reported(line["seq"], line["stop"], line["state"], line["first_row"])


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
