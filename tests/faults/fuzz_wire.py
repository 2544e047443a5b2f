"""Coverage-guided fuzzing of the wire parser and of the daemon behind it (atheris, libFuzzer).

    pip install -e '.[test,fuzz]'
    python -m tests.faults.fuzz_wire out/fuzz -max_total_time=600 -timeout=20

Anything but CorruptMessage and SchemaMismatch out of the parser, anything at all out of the daemon,
an input that takes 20 s and an allocation beyond the limit below end the run, and the input stays
as a file. Options of libFuzzer follow the folder of the corpus, which is filled on the first run.

The first byte of an input says how the rest is read: as a header to put under a right checksum, as
the fields and frames of a message, as changes to the fields of a valid message, or as frames.
"""

from __future__ import annotations

import copy
import logging
import resource
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import atheris
import msgpack

with atheris.instrument_imports(include=["bridge"]):
    from bridge.errors import CorruptMessage, SchemaMismatch
    from bridge.wire import MESSAGES, SCHEMA_VERSION, Hello, decode
    from bridge.wire.envelope import Buffer, checksum, seal

# Behind the parser arrays are compared, and atheris (3.0) keeps every such result that it sees.
from bridge.daemon import Daemon
from bridge.store import MemoryStore
from tests.bridge.wire.test_wire import EXAMPLES

MOST_ADDRESS_SPACE = 4 << 30
STORE_BYTES = 8 << 20
# A daemon whose index is full refuses all the rest: begin anew.
DAEMON_LIFE = 4000

_KINDS = sorted(MESSAGES)
_HEADER, _FIELDS, _CHANGES, _FRAMES = range(4)
_LENGTH = struct.Struct("<H")


class Target:
    """Called with every input; keeps a daemon that remembers what earlier ones told it."""

    def __init__(self) -> None:
        self._daemon: Daemon | None = None
        self._age = 0

    def __call__(self, data: bytes) -> None:
        """Parse an input, and let the daemon handle it."""
        frames = message_of(data)
        try:
            decode(frames)
        except (CorruptMessage, SchemaMismatch):
            return
        daemon = self._living_daemon()
        daemon._handle(b"peer", [memoryview(frame) for frame in frames])
        daemon._ingest.commit()
        daemon._retention.tick()

    def _living_daemon(self) -> Daemon:
        if self._daemon is None or self._age >= DAEMON_LIFE:
            if self._daemon is not None:
                self._daemon.close()
            self._daemon, self._age = Daemon("tcp://127.0.0.1:0", MemoryStore(STORE_BYTES)), 0
            for example in EXAMPLES:
                if isinstance(example, Hello):
                    hello = seal(example.KIND, 0, example.body(), example.frames())
                    self._daemon._handle(b"peer", [memoryview(frame) for frame in hello])
        self._age += 1
        return self._daemon


def message_of(data: bytes) -> list[Buffer]:
    """Return the frames that an input stands for."""
    way, rest = data[:1], data[1:]
    if way == bytes([_HEADER]):
        preamble = struct.pack("<4sHHIQ", b"TRCE", SCHEMA_VERSION, 0, len(rest), checksum(rest))
        return [preamble + rest]
    if way == bytes([_CHANGES]):
        return _changed(atheris.FuzzedDataProvider(rest))
    if way != bytes([_FIELDS]):
        return list(_cut(rest))
    kind, number, rest = rest[:1], rest[1:2], rest[2:]
    body, *frames = _cut(rest)
    try:
        fields = msgpack.unpackb(body, strict_map_key=False)
        name = _KINDS[int.from_bytes(kind) % len(_KINDS)]
        return seal(name, int.from_bytes(number), fields, frames)
    except (ValueError, TypeError, msgpack.UnpackException):
        return frames


def _changed(given: atheris.FuzzedDataProvider) -> list[Buffer]:
    """Return a valid message but for a few fields and perhaps a frame."""
    message = given.PickValueInList(EXAMPLES)
    body, frames = copy.deepcopy(message.body()), list(message.frames())
    for _ in range(given.ConsumeIntInRange(0, 3)):
        fields = given.PickValueInList(_maps_in(body))
        if fields:
            fields[given.PickValueInList(list(fields))] = _value(given, 3)
    if frames and given.ConsumeBool():
        at = given.ConsumeIntInRange(0, len(frames) - 1)
        frames[at] = given.ConsumeBytes(given.ConsumeIntInRange(0, 4096))
    return seal(message.KIND, given.ConsumeIntInRange(0, 1 << 10), body, frames)


def _value(given: atheris.FuzzedDataProvider, depth: int) -> Any:
    choice = given.ConsumeIntInRange(0, 6 if depth else 3)
    match choice:
        case 0:
            return given.ConsumeInt(8)
        case 1:
            return given.ConsumeUnicodeNoSurrogates(given.ConsumeIntInRange(0, 2000))
        case 2:
            return given.ConsumeFloat()
        case 3:
            return given.PickValueInList([None, True, b"", 0, -1, 1 << 62, "fc2", "kv", "open"])
        case 4:
            return {str(i): _value(given, depth - 1) for i in range(given.ConsumeIntInRange(0, 3))}
    return [_value(given, depth - 1) for _ in range(given.ConsumeIntInRange(0, 4))]


def _maps_in(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(found for item in value.values() for found in _maps_in(item))]
    return []


def input_of(kind: str, seq: int, frames: Sequence[bytes], body: bytes) -> bytes:
    """Return the input that stands for a message."""
    head = bytes([_FIELDS, _KINDS.index(kind), seq % 256])
    return head + b"".join(_LENGTH.pack(len(piece)) + piece for piece in (body, *frames))


def _cut(data: bytes) -> list[bytes]:
    """Cut at the lengths that stand in front of the pieces; at least one piece."""
    pieces, at = [], 0
    while at < len(data) or not pieces:
        length = int.from_bytes(data[at : at + _LENGTH.size], "little")
        at += _LENGTH.size
        pieces.append(data[at : at + length])
        at += length
    return pieces


def fill(corpus: Path) -> None:
    """Write an input for every kind of message, if there is none."""
    corpus.mkdir(parents=True, exist_ok=True)
    if any(corpus.iterdir()):
        return
    for number, message in enumerate(EXAMPLES):
        frames = [bytes(frame) for frame in message.frames()]
        fields = input_of(message.KIND, number + 1, frames, msgpack.packb(message.body()))
        whole = bytes(seal(message.KIND, number, message.body(), message.frames())[0])
        (corpus / f"{number}-fields").write_bytes(fields)
        (corpus / f"{number}-changes").write_bytes(bytes([_CHANGES]) + bytes(range(number, 64)))
        (corpus / f"{number}-header").write_bytes(bytes([_HEADER]) + whole[20:])


def main() -> None:
    """Fuzz until libFuzzer's options or a finding end it."""
    if len(sys.argv) < 2:
        sys.exit(f"error: name a folder for the corpus: {__doc__}")
    logging.disable(logging.CRITICAL)
    fill(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_SPACE, MOST_ADDRESS_SPACE))
    atheris.Setup(sys.argv, Target())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
