"""Random bytes and mutated messages: the parser refuses or parses, within bounded memory.

`python -m tests.faults.fuzz_wire` does the same for longer, led by coverage.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bridge.daemon import Daemon
from bridge.errors import CorruptMessage, SchemaMismatch
from bridge.store import MemoryStore
from bridge.wire import MESSAGES, SCHEMA_VERSION, Message, decode
from bridge.wire.envelope import _PREAMBLE, checksum, seal
from tests.bridge.wire.test_wire import EXAMPLES

_ROOT = Path(__file__).parents[3]
_TEXTS = st.text(max_size=20)
_NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.sampled_from([1 << 60, 1 << 31, 4096, -1, 0])
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.floats() | _TEXTS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXTS, inner, max_size=5),
    max_leaves=12,
)


def _parsed(frames: list[bytes]) -> Message | None:
    """Return the message, None if it is refused; any other exception is the test's failure."""
    try:
        return decode(frames)[0]
    except (CorruptMessage, SchemaMismatch):
        return None


def _maps_in(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(found for item in value.values() for found in _maps_in(item))]
    return []


@st.composite
def mutated(draw: st.DrawFn) -> list[bytes]:
    """A message of any kind whose fields and frames are partly others, under right checksums."""
    message = draw(st.sampled_from(EXAMPLES))
    body, frames = copy.deepcopy(message.body()), [bytes(frame) for frame in message.frames()]
    for _ in range(draw(st.integers(0, 3))):
        fields = draw(st.sampled_from(_maps_in(body)))
        fields[draw(st.sampled_from([*fields, "other"]))] = draw(_VALUES)
    if draw(st.booleans()):
        frames = draw(st.permutations(frames))[: draw(st.integers(0, len(frames)))]
    if frames and draw(st.booleans()):
        at = draw(st.integers(0, len(frames) - 1))
        frames[at] = draw(st.binary(max_size=200)) * draw(st.sampled_from([1, 1, 50]))
    kind = draw(st.sampled_from([message.KIND] * 4 + list(MESSAGES)))
    return [bytes(frame) for frame in seal(kind, draw(st.integers(0, 1 << 62)), body, frames)]


@st.composite
def headed(draw: st.DrawFn) -> list[bytes]:
    """Any bytes, or damaged msgpack, as a header under its right checksum."""
    packed = draw(st.binary(max_size=300) | st.builds(msgpack.packb, _VALUES))
    if draw(st.booleans()):
        message = draw(st.sampled_from(EXAMPLES))
        whole = bytearray(seal(message.KIND, 0, message.body(), [])[0])[_PREAMBLE.size :]
        for _ in range(draw(st.integers(1, 4))):
            whole[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
        packed = bytes(whole)
    preamble = _PREAMBLE.pack(b"TRCE", SCHEMA_VERSION, 0, len(packed), checksum(packed))
    return [preamble + packed, *draw(st.lists(st.binary(max_size=50), max_size=3))]


@settings(max_examples=500)
@given(mutated() | headed())
def test_only_the_two_refusals_come_out_of_the_parser(frames: list[bytes]) -> None:
    parsed = _parsed(frames)
    if parsed is not None:
        again = [bytes(frame) for frame in seal(parsed.KIND, 0, parsed.body(), parsed.frames())]
        assert _parsed(again) is not None


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=10))
@example([])
@example([b"TRCE"])
def test_bytes_without_a_checksum_are_refused(frames: list[bytes]) -> None:
    assert _parsed(frames) is None


@pytest.fixture(scope="module")
def daemon() -> Any:
    """A daemon that is handed messages without a socket in between."""
    made = Daemon("tcp://127.0.0.1:0", MemoryStore(8 << 20))
    for message in EXAMPLES:
        if message.KIND == "hello":
            made._handle(b"p", [memoryview(f) for f in seal("hello", 0, message.body(), [])])
    yield made
    made.close()


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=mutated())
def test_nothing_comes_out_of_the_daemon_and_its_index_stays_bounded(
    daemon: Daemon, frames: list[bytes]
) -> None:
    daemon._handle(b"p", [memoryview(frame) for frame in frames])
    daemon._ingest.commit()
    daemon._retention.tick()
    stats = daemon._queries.stats()
    assert stats.index_bytes + stats.memory_bytes <= stats.memory_limit


_WITHIN = """
import resource, sys
from tests.bridge.wire import test_wire_fuzz
fuzz = test_wire_fuzz.test_only_the_two_refusals_come_out_of_the_parser
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (512 << 20),) * 2)
fuzz()
"""


def test_the_parser_gets_by_with_half_a_gibibyte_of_address_space() -> None:
    subprocess.run([sys.executable, "-c", _WITHIN], cwd=_ROOT, check=True, timeout=300)
