"""Every kind of message has the bytes that it had: rollout, bridge and trainer may differ in age.

`wire_vectors.json` holds frames of every kind, in hex: those of the examples of `test_wire` at the
time. Where the form changes on purpose, raise `SCHEMA_VERSION` and write them anew:

    python -m tests.bridge.wire.test_wire_vectors
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from bridge.layout import Part
from bridge.wire import (
    MESSAGES,
    SCHEMA_VERSION,
    Ack,
    Message,
    Ping,
    Rows,
    Trajectory,
    TrajectoryState,
    decode,
    encode,
)
from tests.bridge.wire.test_wire import EXAMPLES

VECTORS = Path(__file__).with_name("wire_vectors.json")
SEQ = 0x1234


def frames_of(message: Message) -> list[str]:
    return [bytes(frame).hex() for frame in encode(message, SEQ)]


def known() -> dict[str, list[list[str]]]:
    """The frames of every example of a kind."""
    vectors: dict[str, list[list[str]]] = json.loads(VECTORS.read_text())
    return vectors


@pytest.mark.parametrize("kind", MESSAGES)
def test_known_bytes_are_read_and_written_again(kind: str) -> None:
    vectors = known()[kind]
    assert vectors
    for frames in vectors:
        message, seq = decode([bytes.fromhex(frame) for frame in frames])
        assert (type(message), seq) == (MESSAGES[kind], SEQ)
        assert frames_of(message) == frames, "the form has changed: see this file's docstring"


def framed(header: str) -> str:
    """A first frame around a msgpack header: magic, schema, reserved, length, checksum."""
    packed = bytes.fromhex(header)
    preamble = b"TRCE" + SCHEMA_VERSION.to_bytes(2, "little") + bytes(2)
    preamble += len(packed).to_bytes(4, "little")
    return (preamble + xxh3_64_intdigest(packed).to_bytes(8, "little") + packed).hex()


def text(value: str) -> str:
    """A short msgpack string."""
    return bytes([0xA0 + len(value)]).hex() + value.encode().hex()


def sums(*frames: bytes) -> str:
    """A short msgpack list of checksums, as 64-bit numbers."""
    numbers = ["cf" + xxh3_64_intdigest(frame).to_bytes(8, "big").hex() for frame in frames]
    return text("sums") + f"{0x90 + len(frames):02x}" + "".join(numbers)


SEQ_1234 = text("seq") + "cd1234"


def test_a_ping_derived_by_hand() -> None:
    header = "84" + text("type") + text("ping") + SEQ_1234 + sums() + text("body") + "80"
    assert frames_of(Ping()) == [framed(header)]


def test_an_acknowledgement_derived_by_hand() -> None:
    body = "81" + text("seqs") + "92" + "05" + "cd0100"
    header = "84" + text("type") + text("ack") + SEQ_1234 + sums() + text("body") + body
    assert frames_of(Ack((5, 256))) == [framed(header)]


def test_row_numbers_and_tokens_are_little_endian() -> None:
    payload = np.array([[1, 2], [3, 4]], np.uint8)
    rows = Rows.of("e", Part.KV, np.array([258, 1 << 40]), payload, "v")
    assert frames_of(rows)[1:] == ["0201000000000000" + "0000000000010000", "01020304"]
    told = Trajectory("e", "t", 0, np.array([258, 3]), np.array([5, -1]), TrajectoryState.FINISHED)
    assert frames_of(told)[1:] == ["02010000" + "03000000", "0500000000000000" + "ff" * 8]


def test_the_checksum_of_every_frame_stands_in_the_header() -> None:
    rows = Rows.of("e", Part.KV, np.array([1]), np.array([[7]], np.uint8), "v")
    head, numbers, payload = frames_of(rows)
    assert sums(bytes.fromhex(numbers), bytes.fromhex(payload)) in head


def _write() -> None:
    vectors = {
        kind: [frames_of(message) for message in EXAMPLES if kind == message.KIND]
        for kind in MESSAGES
    }
    VECTORS.write_text(json.dumps(vectors, indent=1) + "\n")


if __name__ == "__main__":
    _write()
