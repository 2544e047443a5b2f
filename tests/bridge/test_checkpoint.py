"""A start from a checkpoint and what came after gives the index that the whole journal gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.client import TraceClient
from bridge.daemon.retention import Retention
from bridge.embedded import EmbeddedBridge
from bridge.index import Catalog
from bridge.index.checkpoint import Checkpoint, UnusableCheckpoint, read_checkpoint
from bridge.index.recovery import recover
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.producer import RecordProducer
from bridge.store import DiskStore, Entry, Position, Store
from bridge.store.journal import pack
from bridge.wire import (
    Block,
    Dropped,
    Hello,
    Pin,
    Policy,
    Step,
    Trajectory,
    TrajectoryState,
    WeightDigests,
)

LIMIT = 64 << 20
LAYOUT = RecordLayout(ModelShape(1, 64, 32, 8, 2, 1, 16, (0,), (0,)), (0,), (Site.FC1,))
_ROW_BYTES = LAYOUT.row_bytes(Part.FORWARD)

_NAMES = st.sampled_from(["a", "b", "c"])
_TOLD = st.one_of(
    st.tuples(st.just("rows"), st.integers(0, 3000), st.integers(1, 40), st.sampled_from("xyz")),
    st.tuples(st.just("trajectory"), _NAMES, st.integers(0, 3000), st.integers(1, 40)),
    st.tuples(st.just("step"), st.integers(1, 30)),
    st.tuples(st.just("pin"), _NAMES, st.sampled_from([0, 600, 900])),
    st.tuples(st.just("digests"), st.sampled_from("xyz"), st.integers(0, 3)),
    st.tuples(st.just("dropped"), st.integers(1, 5)),
    st.tuples(st.just("gc"), st.integers(1, 3)),
    st.tuples(st.just("checkpoint")),
)


class _Bridge:
    """What a daemon does with messages, without its sockets."""

    def __init__(self, directory: Path) -> None:
        self.store = DiskStore(directory, LIMIT, sync=False)
        self.catalog, _ = recover(self.store)
        self.retention = Retention(self.store, self.catalog, Policy())
        self.seq = 0
        self.row = 0
        self.tell(Hello("e", LAYOUT))

    def tell(self, told: Any, payload: bytes | None = None) -> None:
        self.seq += 1
        if self.catalog.seen(told, self.seq):
            return
        row_bytes = 0 if payload is None else _ROW_BYTES
        (number,) = self.store.append([Entry(pack(told, self.seq), payload, row_bytes)])
        self.catalog.apply(told, self.seq, number)

    def do(self, what: tuple[Any, ...]) -> None:
        match what:
            case ("rows", gap, count, version):
                rows = np.arange(self.row + gap, self.row + gap + count)
                self.row += gap + count
                block = Block("e", Part.FORWARD, version, _ROW_BYTES, rows)
                self.tell(block, bytes(count * _ROW_BYTES))
            case ("trajectory", name, first, count):
                rows = np.arange(first, first + count)
                state = TrajectoryState.FINISHED if count % 2 else TrajectoryState.OPEN
                self.tell(Trajectory("e", name, 0, rows.astype(np.int32), rows, state))
            case ("step", step):
                self.tell(Step(step))
            case ("pin", name, lease_s):
                self.retention.pin(Pin((name,), lease_s))
            case ("digests", version, value):
                self.tell(WeightDigests("e", version, {"w": str(value)}))
            case ("dropped", rows):
                self.tell(Dropped("e", rows, 0))
            case ("gc", keep):
                self.retention.collect(Policy(keep=keep))
                self.retention.look()
            case ("checkpoint",):
                position = self.store.position()
                assert position is not None
                self.store.write_checkpoint(Checkpoint.of(self.catalog, position).chunks())


def _told(catalog: Catalog) -> dict[str, Any]:
    """Everything that an index answers, but how it came to know it."""
    numbers, blocks = catalog.blocks.held()
    everything = slice(None)
    return {
        "step": catalog.step,
        "blocks": (numbers.tolist(), [row.tolist()[:2] for row in blocks]),
        "weights": [catalog.weight_versions[n] for n in blocks["version"].tolist()],
        "engines": [engine.hello for engine in catalog.engine_list],
        "dropped": [engine.dropped_rows for engine in catalog.engine_list],
        "trajectories": {
            name: (
                trajectory.tokens.tolist(),
                trajectory.rows.tolist(),
                trajectory.engines.tolist(),
                trajectory.state,
                trajectory.entries,
                trajectory.step,
                catalog.places(Part.FORWARD, trajectory, everything).tolist(),
            )
            for name, trajectory in catalog.trajectories.items()
        },
        "rows": catalog.rows(Part.FORWARD),
        "states": catalog.states,
        "pins": set(catalog.pins.names),
        "digests": {version: dict(catalog.digests.get(version)) for version in "xyz"},
    }


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(_TOLD, max_size=25))
def test_a_checkpoint_and_what_came_after_give_what_the_whole_journal_gives(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[Any, ...]]
) -> None:
    bridge = _Bridge(tmp_path_factory.mktemp("store"))
    for what in told:
        bridge.do(what)
    whole, _ = recover(bridge.store, from_checkpoint=False)
    quick, _ = recover(bridge.store)
    assert _told(quick) == _told(whole)
    quick.apply(Block("e", Part.FORWARD, "new", _ROW_BYTES, np.arange(2**40, 2**40 + 9)), 999, 9999)
    found = quick.engines["e"].maps[Part.FORWARD].find(np.arange(2**40, 2**40 + 9))
    assert found["block"].tolist() == [9999] * 9
    bridge.store.close()


def test_a_start_reads_only_what_is_newer_than_the_checkpoint(tmp_path: Path) -> None:
    bridge = _Bridge(tmp_path)
    for row in range(5):
        bridge.do(("rows", 0, row + 1, "x"))
    bridge.do(("checkpoint",))
    bridge.do(("rows", 0, 9, "x"))
    read: list[int] = []
    replay = bridge.store.replay
    bridge.store.replay = lambda first=0: (read.append(n) or (n, h) for n, h in replay(first))  # type: ignore[assignment, func-returns-value]
    catalog, _ = recover(bridge.store)
    assert read == [6]
    assert catalog.rows(Part.FORWARD) == 24
    bridge.store.close()


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "another version", "of the future"])
def test_a_checkpoint_that_is_not_right_costs_nothing_but_time(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = _Bridge(tmp_path)
    bridge.do(("rows", 0, 7, "x"))
    bridge.do(("checkpoint",))
    file = tmp_path / "index"
    content = bytearray(file.read_bytes())
    if damage == "another version":
        monkeypatch.setattr("bridge.index.checkpoint._code", lambda: "another")
    elif damage == "of the future":
        position = Position(99, 0)
        bridge.store.write_checkpoint(Checkpoint.of(Catalog(), position).chunks())
    else:
        content[len(content) // 2] ^= 1
        kept = {"flipped": len(content), "cut": len(content) // 2, "empty": 0}[damage]
        file.write_bytes(content[:kept])
    catalog, _ = recover(bridge.store)
    assert catalog.rows(Part.FORWARD) == 7
    bridge.store.close()


def test_numbers_of_deleted_entries_do_not_come_again_after_a_restart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    numbers = store.append([Entry(b"one"), Entry(b"two"), Entry(b"three")])
    store.drop(numbers[1:])
    store.close()
    store = DiskStore(tmp_path, LIMIT)
    assert store.append([Entry(b"four")]) == [3]
    store.close()


def test_a_checkpoint_makes_nothing_but_an_index() -> None:
    class Stranger:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("not this",)

    catalog = Catalog()
    catalog.superseded = Stranger()  # type: ignore[assignment]
    content = b"".join(bytes(chunk) for chunk in Checkpoint.of(catalog, Position(0, 0)).chunks())
    with pytest.raises(UnusableCheckpoint, match="print has no place in an index"):
        read_checkpoint(content)


def test_a_daemon_that_stops_leaves_a_checkpoint_and_the_next_one_reads_no_entry(
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    serve: Callable[[Store], str],
    start_process: Callable[..., EmbeddedBridge],
) -> None:
    bridge = start_process(tmp_path)
    with RecordProducer(bridge.endpoint) as producer:
        producer.hello("e", layout)
        producer.send_rows(Part.FORWARD, range(50), make_rows(Part.FORWARD, range(50)), "v")
        producer.send_trajectory("t", 0, range(50), range(50), "finished")
    bridge.stop()
    store = DiskStore(tmp_path, LIMIT)
    store._headers = lambda first: pytest.fail("an entry is read") if first < 3 else []  # type: ignore[method-assign]
    with TraceClient(serve(store)) as client:
        records = client.fetch("t")
        assert records.forward_valid.all()
