"""A journal has the bytes that it had when schema 4 was also that of the wire.

`journal_schema_4.json` holds the frames of messages of every kind that a journal keeps, in hex, as
a bridge of wire schema 4 wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import pytest

from bridge.store.journal import pack, unpack
from bridge.wire import MESSAGES

_WRITTEN: dict[str, list[list[str]]] = json.loads(
    Path(__file__).with_name("journal_schema_4.json").read_text()
)
_SEQ = 0x1234


@pytest.mark.parametrize("kind", _WRITTEN)
def test_entries_of_schema_4_are_read_and_written_again(kind: str) -> None:
    assert _WRITTEN[kind]
    for frames in _WRITTEN[kind]:
        entry = msgpack.packb([bytes.fromhex(frame) for frame in frames])
        message, seq = unpack(entry)
        assert (type(message), seq) == (MESSAGES[kind], _SEQ)
        assert pack(message, seq) == entry
