"""A store, a peer, a daemon of an older schema: refused in a sentence, and nothing is touched."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import zmq

from bridge.errors import SchemaMismatch, UnknownTrajectory
from bridge.layout import Part
from bridge.store.journal import STORE_SCHEMA
from bridge.wire import (
    SCHEMA_VERSION,
    Error,
    Fetch,
    Hello,
    Message,
    Ping,
    Rows,
    Trajectory,
    TrajectoryState,
    decode,
    encode,
)
from tests.faults import engine
from tests.faults.expected import LAYOUT, Expected
from tests.faults.fault import Fault, Repetition
from tests.faults.killed import finish, one_in_memory, one_on_disk
from tests.faults.message_proxy import Frames, tampered
from tests.faults.outcome import Hang, Outcome
from tests.faults.processes import Bridge, asking, lanes_on_disk, running
from tests.faults.verifier import verify

_VERSION = slice(4, 6)  # of the first frame, little-endian (bridge.wire.envelope)


def older_store(repetition: Repetition) -> Outcome:
    """The daemon does not start and changes nothing; the version that wrote it reads all of it."""
    with repetition.setting.bridge() as bridge:
        directory = bridge.directory
        stream = repetition.stream(bridge.endpoint, rows=100)
        with running(engine.run, stream) as process:
            outcome = finish(repetition, process, stream)
        bridge.kill()
        older = int(repetition.rng.integers(0, STORE_SCHEMA))
        _set_schema(directory, older)
        before = _digest(directory)
        outcome += _refused(directory, older, repetition.end)
        if _digest(directory) != before:
            outcome.reports.append("a store that was refused has changed")
        _set_schema(directory, STORE_SCHEMA)
        bridge.restart()
        with asking(bridge.endpoint, repetition.end) as client:
            return outcome + verify(client, stream) + Outcome(met=1)


def _refused(directory: Path, schema: int, end: float) -> Outcome:
    command = [sys.executable, "-m", "bridge", "serve", "--endpoint", "tcp://127.0.0.1:0"]
    try:
        result = subprocess.run(
            [*command, "--dir", str(directory)],
            capture_output=True,
            text=True,
            timeout=max(1.0, end - time.monotonic()),
        )
    except subprocess.TimeoutExpired as error:
        raise Hang("a daemon with an older store ends") from error
    told = f"error: the store in {directory} has schema {schema} and this process writes"
    if result.returncode == 1 and result.stderr.startswith(told):
        return Outcome()
    return Outcome(reports=[f"an older store: {result.returncode}, {result.stderr}"])


def _set_schema(directory: Path, version: int) -> None:
    with (
        lmdb.open(str(directory), max_dbs=4) as environment,
        environment.begin(environment.open_db(b"about"), write=True) as txn,
    ):
        txn.put(b"schema", str(version).encode())


def _digest(directory: Path) -> str:
    return hashlib.sha256((directory / "data.mdb").read_bytes()).hexdigest()


def older_peer(repetition: Repetition) -> Outcome:
    """Each of its messages is refused and none has an effect; an engine beside it is served."""
    bridge: Bridge = repetition.setting
    stream = repetition.stream(bridge.endpoint, rows=100)
    old = Expected(f"old-{repetition.seed}", 16)
    older = int(repetition.rng.integers(0, SCHEMA_VERSION))
    outcome = Outcome(met=1)
    with running(engine.run, stream) as process:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(bridge.endpoint)
            for seq, message in enumerate(_messages(old)):
                socket.send_multipart(_aged(encode(message, seq), older))
                if not socket.poll(max(0, int((repetition.end - time.monotonic()) * 1000))):
                    raise Hang("an older peer is answered")
                answer, _ = decode(socket.recv_multipart())
                if not isinstance(answer, Error) or answer.code != "SchemaMismatch":
                    outcome.reports.append(f"an older {message.KIND} is answered with {answer}")
        outcome += finish(repetition, process, stream)
    with asking(bridge.endpoint, repetition.end) as client:
        outcome += _told_of_nothing(lambda: client.fetch(old.whole), UnknownTrajectory)
        return outcome + verify(client, stream)


def _messages(old: Expected) -> list[Message]:
    rows = np.arange(old.rows)
    payload = old.payload(Part.FORWARD, 0, old.rows)
    return [
        Ping(),
        Hello(old.engine_id, LAYOUT),
        Rows.of(old.engine_id, Part.FORWARD, rows, payload, "v"),
        Trajectory(
            old.engine_id, old.whole, 0, old.tokens(old.rows), rows, TrajectoryState.FINISHED
        ),
        Fetch(old.whole, 0, None, None, None),
    ]


def _aged(frames: list[bytes | memoryview], version: int) -> Frames:
    head = bytearray(frames[0])
    head[_VERSION] = version.to_bytes(2, "little")
    return [bytes(head), *(bytes(frame) for frame in frames[1:])]


class _Aged:
    """Answers have an older version, as those of an older daemon."""

    def __init__(self, version: int) -> None:
        self._version = version
        self.done = 0

    def __call__(self, frames: Frames) -> list[Frames]:
        self.done += 1
        return [_aged([*frames], self._version)]

    def rest(self) -> list[Frames]:
        return []


def older_daemon(repetition: Repetition) -> Outcome:
    """The engine ends at its hello and a trainer at its question, each with the reason."""
    bridge: Bridge = repetition.setting
    older = int(repetition.rng.integers(0, SCHEMA_VERSION))
    outcome = Outcome(met=1)
    with tampered(bridge.endpoint, lambda _rng: _Aged(older), repetition.rng) as proxy:
        stream = repetition.stream(proxy.endpoint, rows=100)
        with running(engine.run, stream) as process:
            ended = finish(repetition, process, stream)
        if not any("SchemaMismatch" in report for report in ended.reports):
            outcome.reports.append(f"the engine of an older daemon ended: {ended.reports}")
        with asking(proxy.endpoint, repetition.end) as client:
            outcome += _told_of_nothing(client.ping, SchemaMismatch)
    return outcome


def _told_of_nothing(ask: Callable[[], object], reason: type[Exception]) -> Outcome:
    try:
        answer = ask()
    except reason:
        return Outcome()
    return Outcome(wrong=1, reports=[f"answered with {answer} instead of {reason.__name__}"])


FAULTS = (
    Fault("restart on a store of an older schema", "disk", older_store, lanes_on_disk, 6),
    Fault("a peer of an older schema", "disk", older_peer, one_on_disk, 6),
    Fault("a peer of an older schema", "memory", older_peer, one_in_memory, 6),
    Fault("a daemon of an older schema", "memory", older_daemon, one_in_memory, 6),
)
