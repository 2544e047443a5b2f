"""A start from a checkpoint and what came after gives the index that the whole journal gives."""

from __future__ import annotations

import ast
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

import bridge as package
from bridge.client.client import TraceClient
from bridge.daemon.retention import Retention
from bridge.daemon.spawn import EmbeddedBridge
from bridge.index import Catalog
from bridge.index.checkpoint import Checkpoint, read_checkpoint
from bridge.index.recovery import recover
from bridge.index.tables.saved import Saved, UnusableCheckpoint
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.layout.rank_shards import rank_shards
from bridge.producer.producer import RecordProducer
from bridge.store import DiskStore, Entry, Position, Store
from bridge.store.journal import pack
from bridge.wire import (
    Dropped,
    Hello,
    Pin,
    Policy,
    RowsHeader,
    Step,
    Trajectory,
    TrajectoryState,
    WeightDigests,
)

LIMIT = 64 << 20
LAYOUT = RecordLayout(ModelShape(1, 64, 32, 8, 2, 1, 16, (0,), (0,)), (0,), (Site.FC1,))
_ROW_BYTES = LAYOUT.row_bytes(Part.FORWARD)
_SHARED = RecordLayout(LAYOUT.shape, (0,), (Site.FC1, Site.FC2, Site.K))
# Engines of one rank, of two that send halves, and of two that send slots.
_HELLOS = {
    "e": Hello("e", LAYOUT),
    "two": Hello("two", _SHARED, {0: (0.5, 2.0)}, {"path": "é"}, rank_shards(_SHARED, 2)),
    "slots": Hello("slots", _SHARED, shards=rank_shards(_SHARED, 2, 2)),
}
_RANKS = [replace(h, shard=rank) for h in _HELLOS.values() for rank in range(len(h.shards))]

_NAMES = st.sampled_from(["a", "b", "c"])
_TOLD = st.one_of(
    st.tuples(st.just("rows"), st.integers(0, 3000), st.integers(1, 40), st.sampled_from("xyz")),
    st.tuples(st.just("trajectory"), _NAMES, st.integers(0, 3000), st.integers(1, 40)),
    st.tuples(
        st.just("rollout"),
        _NAMES,
        st.sampled_from(["e", "two"]),
        st.integers(0, 4),
        st.booleans(),
        st.integers(0, 9),
        st.sampled_from(TrajectoryState),
        st.booleans(),
    ),
    st.tuples(st.just("share"), st.sampled_from(["two", "slots"]), st.integers(0, 1)),
    st.tuples(st.just("kv"), st.integers(1, 3)),
    st.tuples(st.just("step"), st.integers(1, 30)),
    st.tuples(st.just("pin"), _NAMES, st.sampled_from([0, 600, 900])),
    st.tuples(st.just("digests"), st.sampled_from("xyz"), st.integers(0, 3)),
    st.tuples(st.just("digests of"), st.sampled_from("xyz"), st.text(max_size=3)),
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
        self.shared_row = {"two": [0, 0], "slots": [0, 0]}
        for hello in _RANKS:
            self.tell(hello)

    def tell(self, told: Any, seq: int | None = None) -> None:
        self.seq += 1
        seq = self.seq if seq is None else seq
        if self.catalog.seen(told, seq):
            return
        self.catalog.check(told)
        row_bytes = told.row_bytes if isinstance(told, RowsHeader) else 0
        payload = bytes(len(told.rows) * row_bytes) if row_bytes else None
        (number,) = self.store.append([Entry(pack(told, seq), payload, row_bytes)])
        self.catalog.apply(told, seq, number)

    def do(self, what: tuple[Any, ...]) -> None:
        match what:
            case ("rows", gap, count, version):
                rows = np.arange(self.row + gap, self.row + gap + count)
                self.row += gap + count
                self.tell(RowsHeader("e", Part.FORWARD, version, _ROW_BYTES, rows))
            case ("trajectory", name, first, count):
                rows = np.arange(first, first + count)
                state = TrajectoryState.FINISHED if count % 2 else TrajectoryState.OPEN
                self.tell(Trajectory("e", name, 0, rows.astype(np.int32), rows, state))
            case ("rollout", name, engine, rollout, continues, start, state, late):
                rows = np.arange(start, start + 5) + 10 * rollout
                tokens = rows.astype(np.int32)
                rest = (state, 0, rollout, continues)
                told = Trajectory(engine, name, start, tokens, rows, *rest)
                self.tell(told, 2**40 - self.seq if late else None)
            case ("share", engine, rank):
                layout = _HELLOS[engine].shards[rank].layout
                first, row_bytes = self.shared_row[engine][rank], layout.row_bytes(Part.FORWARD)
                if engine == "slots":
                    shard = _HELLOS[engine].shards[rank]
                    row_bytes = shard.head_bytes + first % 2 * shard.slot_bytes
                self.shared_row[engine][rank] += 700
                rows = np.arange(first, first + 700)
                self.tell(RowsHeader(engine, Part.FORWARD, "x", row_bytes, rows, rank, f"w{rank}"))
            case ("kv", count):
                row_bytes = _HELLOS["two"].shards[0].layout.row_bytes(Part.KV)
                self.tell(RowsHeader("two", Part.KV, "z", row_bytes, np.arange(count)))
            case ("digests of", version, text):
                self.tell(WeightDigests("two", version, {"w": "0", f"ü{text}": text}, 1))
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
                self.retention.tick()
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
                catalog.locations(Part.FORWARD, trajectory, everything).tolist(),
            )
            for name, trajectory in catalog.trajectories.items()
        },
        "rows": catalog.rows(Part.FORWARD),
        "states": catalog.states,
        "kv_rows": catalog.rows(Part.KV),
        "partial_rows": catalog.partial_rows(),
        "pins": set(catalog.pins.names),
        "digests": {version: dict(catalog.digests.get(version)) for version in "xyz"},
    }


def _plain(value: Any) -> Any:
    """A snapshot of which two can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _held(catalog: Catalog) -> dict[str, Any]:
    """Everything that an index answers, and all that it goes on with."""
    nbytes = catalog.nbytes() - catalog.blocks.nbytes()  # there is room for more of them or not
    asked = [_told(catalog), nbytes, sorted(catalog.entries().tolist())]
    engines = [
        (
            engine.number,
            engine.is_shared,
            engine.incarnations,
            engine.dropped_entries,
            [seq in seqs for seqs in engine.accepted for seq in range(60)],
            [(m.highest, m.rows, m.partial_rows, m.nbytes()) for m in engine.maps.values()],
            [m.find_each(np.arange(3000)).tolist() for m in engine.maps.values()],
        )
        for engine in catalog.engine_list
    ]
    trajectories = [
        (
            each.rollouts.__dict__,
            each.sources,
            None if each.origins is None else each.origins.tolist(),
            each.revision,
            each.last,
            each.nbytes(),
            catalog.blocks_of(each).tolist(),
        )
        for each in catalog.trajectories.values()
    ]
    others = [
        list(catalog.engines),
        list(catalog.trajectories),
        [list(catalog.digests.get(version)) for version in "xyz"],
        [catalog.pins.entries(), catalog.pins.nbytes, len(catalog.steps), catalog.steps.nbytes()],
        [list(catalog.versions_used), catalog.weight_versions, catalog.weights],
        [catalog._version_numbers, catalog.superseded, catalog.digests.entries()],
        [catalog.digests.steps(), sorted(catalog.steps.behind(1))],
    ]
    snapshot = _plain(catalog.snapshot())
    return {"asked": asked, "engines": engines, "of each": trajectories, "others": others} | {
        "snapshot": snapshot
    }


def _content(taken: Checkpoint) -> bytes:
    return b"".join(bytes(chunk) for chunk in taken.chunks())


_HISTORIES = st.lists(_TOLD, max_size=25)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_HISTORIES, st.lists(_TOLD, max_size=8))
def test_an_index_is_the_same_after_it_was_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[Any, ...]], more: list[Any]
) -> None:
    bridge = _Bridge(tmp_path_factory.mktemp("store"))
    for what in told:
        bridge.do(what)
    held, position = _held(bridge.catalog), Position(bridge.seq, 3)
    taken = Checkpoint.of(bridge.catalog, position)
    content = bytearray(_content(taken))
    assert taken.nbytes() == len(content)
    again, read = read_checkpoint(content)
    assert read == position
    whole = bytes(content)
    content[:] = bytes(len(content))  # nothing of the index lies in the file
    assert _held(again) == held
    # Both go on alike, and what was taken before does not change with them.
    store, other = bridge.store, bridge.catalog
    again.begin_anew()
    for catalog in (again, other):
        bridge.catalog, bridge.seq = catalog, position.next
        bridge.shared_row = {"two": [9000, 9000], "slots": [9000, 9000]}
        bridge.store = _Numbered(store, 10_000)  # type: ignore[assignment]
        bridge.retention = Retention(bridge.store, catalog, Policy())
        bridge.row = 5000
        for what in more:
            bridge.do(what)
    assert _held(again) == _held(other)
    assert _content(taken) == whole
    store.close()


class _Numbered:
    """A store that gives the numbers it is asked for, and of which nothing is read."""

    def __init__(self, store: DiskStore, first: int) -> None:
        self._store, self._next = store, first

    def append(self, entries: list[Entry]) -> list[int]:
        self._next += len(entries)
        return list(range(self._next - len(entries), self._next))

    def delete(self, numbers: list[int]) -> None: ...

    def position(self) -> Position:
        return Position(self._next, 0)

    def write_checkpoint(self, content: Iterator[bytes]) -> bool:
        return bool(list(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_HISTORIES)
def test_a_checkpoint_and_what_came_after_give_what_the_whole_journal_gives(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[Any, ...]]
) -> None:
    bridge = _Bridge(tmp_path_factory.mktemp("store"))
    for what in told:
        bridge.do(what)
    whole, _ = recover(bridge.store, from_checkpoint=False)
    quick, _ = recover(bridge.store)
    assert _told(quick) == _told(whole)
    quick.apply(
        RowsHeader("e", Part.FORWARD, "new", _ROW_BYTES, np.arange(2**40, 2**40 + 9)), 999, 9999
    )
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
    assert read == [len(bridge.catalog.entries()) + len(_RANKS) - 1]
    assert catalog.rows(Part.FORWARD) == 24
    bridge.store.close()


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "empty", "another version", "an older format", "of the future"]
)
def test_a_checkpoint_that_is_not_right_costs_nothing_but_time(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = _Bridge(tmp_path)
    bridge.do(("rows", 0, 7, "x"))
    bridge.do(("checkpoint",))
    file = tmp_path / "index"
    content = bytearray(file.read_bytes())
    if damage == "another version":
        monkeypatch.setattr("bridge.index.checkpoint._code", lambda: bytes(16))
    elif damage == "an older format":
        body = b"bridge index 1\n" + content[15:-16]
        file.write_bytes(body + xxh3_128_digest(body))
    elif damage == "of the future":
        position = Position(99, 0)
        bridge.store.write_checkpoint(Checkpoint.of(Catalog(), position).chunks())
    else:
        content[len(content) // 2] ^= 1
        kept = {"flipped": len(content), "cut": len(content) // 2, "empty": 0}[damage]
        file.write_bytes(content[:kept])
    with caplog.at_level(logging.INFO):
        catalog, _ = recover(bridge.store)
    assert catalog.rows(Part.FORWARD) == 7
    assert (
        "the daemon ignores the checkpoint and reads the whole journal: it is " in caplog.text
        or (damage == "another version" and "another version wrote it" in caplog.text)
    )
    bridge.do(("checkpoint",))
    assert read_checkpoint(file.read_bytes())[0].rows(Part.FORWARD) == 7
    bridge.store.close()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint of an index that has some of everything."""
    bridge = _Bridge(tmp_path_factory.mktemp("store"))
    for what in [
        ("rows", 0, 40, "x"),
        ("share", "two", 0),
        ("rollout", "a", "e", 1, False, 0, TrajectoryState.OPEN, False),
        ("rollout", "a", "e", 2, True, 4, TrajectoryState.FINISHED, False),
        ("trajectory", "b", 0, 9),
        ("pin", "b", 600),
        ("digests", "x", 1),
        ("digests of", "y", "ö"),
        ("dropped", 3),
        ("step", 2),
    ]:
        bridge.do(what)
    bridge.store.close()
    return _content(Checkpoint.of(bridge.catalog, Position(12, 0)))


@settings(deadline=None)
@given(st.data())
def test_a_checkpoint_with_a_byte_altered_or_its_end_cut_off_is_refused(
    content: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(content) - 1))
    altered = bytearray(content)
    altered[at] ^= data.draw(st.integers(1, 255))
    for wrong in (altered, content[:at], content + b"0"):
        with pytest.raises(UnusableCheckpoint):
            read_checkpoint(wrong)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_checkpoint_that_was_forged_is_refused_or_gives_an_index(
    content: bytes, data: st.DataObject
) -> None:
    body = bytearray(content[:-16])
    head_end = _HEAD_AT + _head_length(content)
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([head_end, len(body)]))
        body[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    try:
        catalog, _ = read_checkpoint(_sealed(bytes(body)))
    except UnusableCheckpoint:
        return
    assert type(catalog) is Catalog


_HEAD_AT = 55


def _head_length(content: bytes) -> int:
    return int(struct.unpack_from("<Q", content, _HEAD_AT - 8)[0])


def _sealed(body: bytes) -> bytes:
    return body + xxh3_128_digest(body)


def _with_head(content: bytes, head: bytes, rest: bytes = b"", length: int | None = None) -> bytes:
    length = len(head) if length is None else length
    return _sealed(content[: _HEAD_AT - 8] + struct.pack("<Q", length) + head + rest)


def _array(*named: Any) -> bytes:
    packed: bytes = msgpack.packb({"superseded": msgpack.ExtType(1, msgpack.packb(named))})
    return packed


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (_array("<i8", 2**61), "an array is longer than the file"),
        (_array("<i8", 2**61, 8), "an array is longer than the file"),
        (_array("<i8", -1), "its head has an invalid array"),
        (_array("<i8", 1.0), "its head has an invalid array"),
        (_array("<i8", *[1] * 62), "exceeds max_ext_len"),
        (_array("|O", 1), "KeyError"),
        (_array(["<i8"], 1), "TypeError"),
        (msgpack.packb({"a": msgpack.ExtType(2, msgpack.packb(["<i8", 1]))}), "an invalid array"),
        (msgpack.packb([]), "its head does not match its arrays"),
        (msgpack.packb({}), "its head does not match its arrays"),
        (b"\xdd\xff\xff\xff\xff", "exceeds max_array_len"),
        (b"\xdf\xff\xff\xff\xff", "exceeds max_map_len"),
        (b"\x91" * 5000, "StackError"),
        (b"\x81\xa1a\xc4\x01x", "exceeds max_bin_len"),
        (b"\xc1", "FormatError"),
        (b"", "ValueError"),
    ],
)
def test_what_a_head_announces_is_looked_at_before_room_is_made(
    content: bytes, head: bytes, why: str
) -> None:
    with pytest.raises(UnusableCheckpoint, match=why):
        read_checkpoint(_with_head(content, head, bytes(8)))


def test_a_head_longer_than_the_file_is_refused(content: bytes) -> None:
    with pytest.raises(UnusableCheckpoint, match="its head is longer than the file"):
        read_checkpoint(_with_head(content, b"\x80", length=2**63))


def test_a_snapshot_in_another_form_is_refused(content: bytes) -> None:
    snapshot = read_checkpoint(content)[0].snapshot()
    assert Catalog.restore(Saved(snapshot)).rows(Part.FORWARD) == 40
    count = 0
    for parent, name in list(_places(snapshot)):
        kept = parent[name]
        for wrong in _wrong(kept):
            parent[name] = wrong
            with pytest.raises((UnusableCheckpoint, ValueError)):
                Catalog.restore(Saved(snapshot))
            count += 1
        parent[name] = kept
    assert count > 200


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (map or list, key) of all values within one, but not within hellos."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        if name != "hello":
            yield value, name
        if isinstance(item, dict | list) and name != "hello":
            yield from _places(item)


def _wrong(value: Any) -> Iterator[Any]:
    yield None
    yield "text"
    if isinstance(value, np.ndarray):
        yield value.astype(np.float64)
        yield value[None]


def test_a_checkpoint_holds_nothing_but_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for stranger in (object(), print, {1}, np.array([print]), np.zeros(1, np.float32)):
        monkeypatch.setattr(Catalog, "snapshot", lambda _, kept=stranger: {"kept": kept})
        with pytest.raises(TypeError, match=r"cannot be stored in a checkpoint|can not serialize"):
            Checkpoint.of(Catalog(), Position(0, 0))


def test_no_module_of_the_bridge_reads_objects_that_name_code() -> None:
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "copyreg"}
    for file in Path(next(iter(package.__path__))).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            names.append(getattr(node, "module", None) or "")
            assert not banned.intersection(name.split(".")[0] for name in names), file


def test_of_trajectories_some_have_several_rollouts() -> None:
    catalog = Catalog()
    catalog.apply(Hello("e", LAYOUT), 0, 0)
    tokens, rows, state = np.arange(4, dtype=np.int32), np.arange(4), TrajectoryState.OPEN
    catalog.apply(Trajectory("e", "a", 0, tokens, rows, state, rollout=1), 1, 1)
    later = Trajectory("e", "a", 4, tokens, rows, state, rollout=2, continues=True)
    catalog.apply(later, 2, 2)
    catalog.apply(Trajectory("e", "b", 0, tokens, rows, state, rollout=3), 3, 3)
    again, _ = read_checkpoint(_content(Checkpoint.of(catalog, Position(4, 0))))
    origins = again.trajectories["a"].origins
    assert origins is not None
    assert origins.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert again.trajectories["b"].origins is None


def test_numbers_of_deleted_entries_do_not_come_again_after_a_restart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    numbers = store.append([Entry(b"one"), Entry(b"two"), Entry(b"three")])
    store.delete(numbers[1:])
    store.close()
    store = DiskStore(tmp_path, LIMIT)
    assert store.append([Entry(b"four")]) == [3]
    store.close()


def test_a_daemon_that_stops_leaves_a_checkpoint_and_the_next_one_reads_no_entry(
    tmp_path: Path,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
    serve: Callable[[Store], str],
    start_process: Callable[..., EmbeddedBridge],
) -> None:
    bridge = start_process(tmp_path)
    with RecordProducer(bridge.endpoint) as producer:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(50), make_rows(Part.FORWARD, range(50)), "v")
        producer.send_trajectory("t", 0, range(50), range(50), "finished")
    bridge.stop()
    store = DiskStore(tmp_path, LIMIT)
    store._headers = lambda first: pytest.fail("an entry is read") if first < 3 else []  # type: ignore[method-assign]
    with TraceClient(serve(store)) as client:
        records = client.fetch("t")
        assert records.forward_valid.all()
