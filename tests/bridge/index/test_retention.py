"""What is given up, what stays, and that the space is used again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import CorruptMessage, StoreFull, UnknownTrajectory
from bridge.index import Catalog
from bridge.index.catalog import JournalRecord
from bridge.index.retention import garbage
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.store import CachedStore, DiskStore, Entry, MemoryStore, Store
from bridge.store.journal import unpack
from bridge.wire import Hello, Policy, RowsHeader, Step, Trajectory, TrajectoryState, WeightDigests

OPEN, FINISHED = TrajectoryState.OPEN, TrajectoryState.FINISHED
MakeRows = Callable[..., NDArray[np.uint8]]


@pytest.fixture
def trainer(endpoint: str) -> Iterator[TraceClient]:
    with TraceClient(endpoint) as client:
        yield client


@pytest.fixture
def engine(endpoint: str, layout: RecordLayout) -> Iterator[RecordProducer]:
    with RecordProducer(endpoint) as producer:
        producer.register("e", layout)
        yield producer


def _record(
    engine: RecordProducer, make_rows: MakeRows, name: str, first: int, version: str = "0"
) -> None:
    """Three rows and the trajectory that they are."""
    rows = range(first, first + 3)
    engine.send_rows(Part.FORWARD, rows, make_rows(Part.FORWARD, rows), version)
    engine.send_trajectory(name, 0, rows, rows, "finished")
    engine.flush()


def _names(trainer: TraceClient) -> list[str]:
    return [item.trajectory for item in trainer.list_trajectories()]


def test_old_steps_go_and_the_rows_that_younger_trajectories_share_stay(
    engine: RecordProducer, trainer: TraceClient, make_rows: MakeRows
) -> None:
    _record(engine, make_rows, "old", 0)
    _record(engine, make_rows, "shared", 10)
    trainer.begin_step(1)
    _record(engine, make_rows, "new", 20)
    engine.send_trajectory("heir", 0, [10, 11, 99], [10, 11, 22], "finished")
    engine.flush()
    done = trainer.gc(Policy(keep=1))
    assert (done.trajectories, done.rows) == (2, 3)
    assert _names(trainer) == ["new", "heir"]
    np.testing.assert_array_equal(
        trainer.fetch("heir").forward, make_rows(Part.FORWARD, [10, 11, 22])
    )
    with pytest.raises(UnknownTrajectory):
        trainer.fetch("old")
    assert trainer.gc(Policy(keep=1)).trajectories == 0


def test_rows_of_this_step_stay_before_any_trajectory_names_them(
    engine: RecordProducer, trainer: TraceClient, make_rows: MakeRows
) -> None:
    trainer.begin_step(5)
    engine.send_rows(Part.FORWARD, [7], make_rows(Part.FORWARD, [7]), "0")
    engine.flush()
    assert trainer.gc(Policy(keep=1, max_version_diff=0)).rows == 0
    engine.send_trajectory("t", 0, [1], [7], "finished")
    engine.flush()
    assert trainer.fetch("t").forward_valid.all()


@pytest.mark.parametrize(("versions", "oldest"), [("0 1 2 10", "10"), ("a b c d", "c")])
def test_rows_too_many_weight_versions_behind_go(
    engine: RecordProducer,
    trainer: TraceClient,
    make_rows: MakeRows,
    versions: str,
    oldest: str,
) -> None:
    names = versions.split()
    for number, version in enumerate(names):
        _record(engine, make_rows, version, 10 * number, version)
    trainer.gc(Policy(max_version_diff=1))
    assert _names(trainer) == names[names.index(oldest) :]


def test_a_trajectory_over_many_versions_loses_only_its_old_rows(
    engine: RecordProducer, trainer: TraceClient, make_rows: MakeRows
) -> None:
    for number in range(3):
        payload = make_rows(Part.FORWARD, [number])
        engine.send_rows(Part.FORWARD, [number], payload, str(number))
    engine.send_trajectory("t", 0, [1, 2, 3], [0, 1, 2], "finished")
    engine.flush()
    trainer.gc(Policy(max_version_diff=1))
    assert trainer.fetch("t").forward_valid.tolist() == [False, True, True]


def test_pinned_trajectories_stay_whole_until_they_are_let_go(
    engine: RecordProducer, trainer: TraceClient, make_rows: MakeRows
) -> None:
    for number, version in enumerate(("0", "1", "2")):
        _record(engine, make_rows, f"t{version}", 10 * number, version)
    trainer.begin_step(9)
    trainer.pin(["t0"])
    trainer.gc(Policy(keep=1, max_version_diff=0))
    assert _names(trainer) == ["t0"]
    assert trainer.fetch("t0").forward_valid.all()
    trainer.unpin(["t0"])
    trainer.gc(Policy(keep=1))
    assert _names(trainer) == []


def test_a_pin_ends_with_its_lease(
    engine: RecordProducer, trainer: TraceClient, make_rows: MakeRows
) -> None:
    _record(engine, make_rows, "t", 0)
    trainer.pin(["t"], lease_s=1)
    trainer.begin_step(9)
    assert trainer.gc(Policy(keep=1)).trajectories == 0
    end = time.monotonic() + 30
    while trainer.gc(Policy(keep=1)).trajectories == 0:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_what_never_finishes_expires_and_what_is_finished_does_not(
    start_process: Callable[..., EmbeddedBridge], layout: RecordLayout
) -> None:
    bridge = start_process(expire_s=1)
    with RecordProducer(bridge.endpoint) as engine, TraceClient(bridge.endpoint) as trainer:
        engine.register("e", layout)
        engine.send_trajectory("open", 0, [1], [-1], "open")
        engine.send_trajectory("finished", 0, [1], [-1], "finished")
        engine.send_trajectory("aborted", 0, [1], [-1], "aborted")
        engine.flush()
        end = time.monotonic() + 30
        while _names(trainer) != ["finished", "aborted"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert trainer.stats().collected == 1


def test_steps_beyond_keep_go_by_themselves_for_ever_within_the_same_space(
    tmp_path: Path,
    start_process: Callable[..., EmbeddedBridge],
    layout: RecordLayout,
    make_rows: MakeRows,
) -> None:
    """Far more than the limit passes through a store that keeps two steps."""
    bridge = start_process(tmp_path, disk_limit="2MiB", memory_limit="1MiB", keep=2)
    payload = np.repeat(make_rows(Part.FORWARD, range(100)), 100, axis=0)
    with RecordProducer(bridge.endpoint) as engine, TraceClient(bridge.endpoint) as trainer:
        engine.register("e", layout)
        most = 0
        for step in range(15):
            trainer.begin_step(step)
            rows = range(step * 10_000, (step + 1) * 10_000)
            engine.send_rows(Part.FORWARD, rows, payload, str(step))
            engine.send_trajectory(f"t{step}", 0, range(10_000), rows, "finished")
            engine.flush(timeout_s=60)
            most = max(most, trainer.stats().disk_bytes)
        assert _names(trainer) == ["t13", "t14"]
        stats = trainer.stats()
        assert stats.memory_bytes + stats.index_bytes <= stats.memory_limit
        assert most < 2 << 20 < 15 * payload.nbytes
    files = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert files < 2.1 * (1 << 20)
    bridge.process.kill()
    bridge.process.wait()
    bridge = start_process(tmp_path, disk_limit="2MiB", memory_limit="1MiB", keep=2)
    with TraceClient(bridge.endpoint) as trainer:
        assert trainer.stats().step == 14
        np.testing.assert_array_equal(trainer.fetch("t14").forward, payload)
        np.testing.assert_array_equal(trainer.fetch("t13").forward, payload)


def test_digests_of_old_steps_go_and_the_newest_stay(
    engine: RecordProducer, trainer: TraceClient
) -> None:
    for step in range(3):
        trainer.begin_step(step)
        engine.send_digests(str(step), {"w": f"0{step}"})
        engine.flush()
    trainer.gc(Policy(keep=1))
    assert [trainer.digests(str(step)) for step in range(3)] == [{}, {}, {"w": "02"}]


def test_pins_hold_after_a_restart_and_what_was_unpinned_does_not(
    tmp_path: Path,
    start_process: Callable[..., EmbeddedBridge],
    layout: RecordLayout,
    make_rows: MakeRows,
) -> None:
    bridge = start_process(tmp_path, keep=1)
    with RecordProducer(bridge.endpoint) as engine, TraceClient(bridge.endpoint) as trainer:
        engine.register("e", layout)
        for number, name in enumerate(("pinned", "twice", "unpinned", "other")):
            _record(engine, make_rows, name, 10 * number)
        trainer.pin(["pinned", "twice", "unpinned"])
        trainer.pin(["twice"], lease_s=60)
        trainer.unpin(["unpinned"])
    bridge.process.kill()
    bridge.process.wait()
    bridge = start_process(tmp_path, keep=1)
    with TraceClient(bridge.endpoint) as trainer:
        trainer.begin_step(7)
        trainer.gc(Policy(keep=1))
        assert _names(trainer) == ["pinned", "twice"]
        trainer.unpin(["pinned", "twice"])
        trainer.gc(Policy(keep=1))
        assert _names(trainer) == []
    bridge.stop()
    store = DiskStore(tmp_path, 1 << 30)
    kinds = [unpack(header)[0].KIND for _, header in store.replay()]
    store.close()
    assert "pin" not in kinds


def test_pins_are_bounded_in_number_and_in_bytes(trainer: TraceClient) -> None:
    trainer.pin([f"{number}" for number in range(1000)])
    with pytest.raises(StoreFull, match="unpin some"):
        trainer.pin([f"{number:04d}" + "\U0001f600" * 1000 for number in range(1000)])
    trainer.unpin([f"{number}" for number in range(1000)])
    trainer.pin(["t"])


def test_a_trainer_that_goes_back_keeps_what_is_recorded_from_there_on(
    engine: RecordProducer, trainer: TraceClient, make_rows: MakeRows
) -> None:
    for step in (8, 9, 10):
        trainer.begin_step(step)
        _record(engine, make_rows, f"t{step}", 10 * step, str(step))
    trainer.begin_step(8)
    for step in (8, 9, 10, 11):
        trainer.begin_step(step)
        _record(engine, make_rows, f"again{step}", 1000 + 10 * step, str(step))
        trainer.gc(Policy(keep=2, max_version_diff=1))
        kept = _names(trainer)
        assert {f"again{s}" for s in range(max(8, step - 1), step + 1)} <= set(kept)
    assert [name for name in kept if name.startswith("again")] == ["again10", "again11"]


@pytest.mark.parametrize("absurd", [(1 << 31) - 1, 1_000_000])
def test_one_absurd_step_and_version_age_like_any_other(
    engine: RecordProducer, trainer: TraceClient, make_rows: MakeRows, absurd: int
) -> None:
    policy = Policy(keep=2, max_version_diff=1)
    for number, step in enumerate([5, 6, absurd, 7, 8, 9]):
        trainer.begin_step(step)
        _record(engine, make_rows, f"t{step}", 10 * number, str(step))
        trainer.gc(policy)
        if step == absurd:
            assert _names(trainer) == ["t6", f"t{absurd}"]
    assert _names(trainer) == ["t8", "t9"]
    assert trainer.stats().step == 9


def test_a_step_beyond_the_range_is_refused_with_a_sentence(trainer: TraceClient) -> None:
    with pytest.raises(CorruptMessage, match="count steps from 0"):
        trainer.begin_step(1 << 60)


def test_a_step_that_another_rank_says_late_changes_nothing(
    engine: RecordProducer, trainer: TraceClient, make_rows: MakeRows
) -> None:
    trainer.begin_step(5)
    trainer.begin_step(6)
    trainer.begin_step(5)
    _record(engine, make_rows, "t", 0)
    trainer.begin_step(6)
    trainer.gc(Policy(keep=1))
    assert _names(trainer) == ["t"]


def test_steps_and_dropped_counts_take_no_space_for_ever(
    tmp_path: Path, serve: Callable[..., str], layout: RecordLayout
) -> None:
    disk = DiskStore(tmp_path, 1 << 20)
    endpoint = serve(CachedStore(disk, 8 << 20))
    with RecordProducer(endpoint) as engine, TraceClient(endpoint) as trainer:
        engine.register("e", layout)
        before = trainer.stats()
        for number in range(1500):
            trainer.begin_step(number + 1)
            engine.count_dropped(Part.FORWARD, 1)
            engine.flush()
        after = trainer.stats()
    assert (after.step, after.dropped_rows) == (1500, 1500)
    assert after.disk_bytes - before.disk_bytes < 64 << 10
    assert after.index_bytes - before.index_bytes < 64 << 10
    disk.close()


@given(
    st.lists(
        st.tuples(st.sampled_from(["rows", "trajectory", "step", "collect"]), st.integers(0, 9)),
        max_size=40,
    )
)
def test_a_restart_finds_the_steps_that_matter(
    layout: RecordLayout, story: list[tuple[str, int]]
) -> None:
    catalog, journal = Catalog(), {}
    width = layout.row_bytes(Part.FORWARD)

    def tell(told: JournalRecord) -> None:
        journal[len(told_all)] = told
        catalog.apply(told, len(told_all), len(told_all))
        told_all.append(told)

    told_all: list[JournalRecord] = []
    tell(Hello("e", layout))
    for kind, value in story:
        row = np.array([len(told_all)])
        if kind == "rows":
            tell(RowsHeader("e", Part.FORWARD, "v", width, row))
        elif kind == "trajectory":
            tell(Trajectory("e", f"t{value}", 0, row.astype(np.int32), row, FINISHED))
        elif kind == "step" and not catalog.steps.has_begun(value):
            tell(Step(value))
        elif kind == "collect":
            found = garbage(catalog, Policy(keep=1 + value), set(), 0.0)
            gone = catalog.delete(found.trajectories, found.blocks)
            catalog.supersede_steps()
            for number in [*gone, *catalog.superseded]:
                del journal[number]
            catalog.superseded = []
    again = Catalog()
    for number, told in journal.items():
        again.apply(told, number, number)
    assert again.step == catalog.step
    assert {name: t.step for name, t in again.trajectories.items()} == {
        name: t.step for name, t in catalog.trajectories.items()
    }
    np.testing.assert_array_equal(again.blocks.held()[1]["step"], catalog.blocks.held()[1]["step"])
    for keep in range(1, 4):
        mine, theirs = catalog.steps.behind(keep), again.steps.behind(keep)
        held = {t.step for t in catalog.trajectories.values()}
        assert mine & held == theirs & held


_STORY = st.lists(
    st.tuples(
        st.sampled_from(["rows", "trajectory", "step"]),
        st.integers(0, 5),
        st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    ),
    max_size=25,
)


@given(_STORY, st.integers(1, 3), st.sets(st.integers(0, 5)))
def test_no_row_of_a_trajectory_that_stays_is_ever_given_up(
    layout: RecordLayout,
    story: list[tuple[str, int, list[int]]],
    keep: int,
    pinned: set[int],
) -> None:
    catalog = Catalog()
    catalog.apply(Hello("e", layout), 0, 0)
    width = layout.row_bytes(Part.FORWARD)
    for number, (kind, value, rows) in enumerate(story, start=1):
        if kind == "rows":
            block = RowsHeader("e", Part.FORWARD, "v", width, np.array(rows))
            catalog.apply(block, number, number)
        elif kind == "trajectory":
            tokens = np.array(rows, dtype=np.int32)
            told = Trajectory("e", f"t{value}", 0, tokens, np.array(rows), FINISHED)
            catalog.apply(told, number, number)
        else:
            catalog.apply(Step(catalog.step + 1), number, number)
    before = {name: _held(catalog, name) for name in catalog.trajectories}
    names = {f"t{value}" for value in pinned}
    found = garbage(catalog, Policy(keep=keep), names, 0.0)
    numbers = catalog.delete(found.trajectories, found.blocks)
    assert len(set(numbers)) == len(numbers)
    for name in catalog.trajectories:
        assert _held(catalog, name) == before[name]
    for name in before.keys() & names:
        assert name in catalog.trajectories
    oldest = catalog.step - keep + 1
    assert all(t.step >= oldest or n in names for n, t in catalog.trajectories.items())


def _held(catalog: Catalog, name: str) -> list[tuple[int, int]]:
    trajectory = catalog.trajectories[name]
    locations = catalog.locations(Part.FORWARD, trajectory, slice(0, len(trajectory)))
    return [(int(location["block"]), int(location["offset"])) for location in locations]


def test_the_index_shrinks_with_what_is_given_up(layout: RecordLayout) -> None:
    catalog = Catalog()
    catalog.apply(Hello("e", layout), 0, 0)
    catalog.apply(WeightDigests("e", "0", {"w": "00"}), 1, 1)
    sizes = []
    for step in range(6):
        catalog.apply(Step(step), 0, 10 * step + 2)
        rows = np.arange(step * 5000, step * 5000 + 5000)
        width = layout.row_bytes(Part.FORWARD)
        catalog.apply(RowsHeader("e", Part.FORWARD, "v", width, rows), step + 2, 10 * step + 3)
        tokens = np.zeros(5000, dtype=np.int32)
        told = Trajectory("e", f"t{step}", 0, tokens, rows, FINISHED)
        catalog.apply(told, step + 20, 10 * step + 4)
        found = garbage(catalog, Policy(keep=2), set(), 0.0)
        catalog.delete(found.trajectories, found.blocks)
        sizes.append(catalog.nbytes())
    assert sizes[0] < sizes[2] == pytest.approx(sizes[5], rel=0.1)
    assert catalog.rows(Part.FORWARD) == 10_000


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_full_store_takes_the_news_of_a_step_and_has_room_again(
    tmp_path: Path,
    serve: Callable[..., str],
    layout: RecordLayout,
    make_rows: MakeRows,
    tier: str,
) -> None:
    limit = 2 << 20
    disk = DiskStore(tmp_path, limit)
    store: Store = MemoryStore(limit) if tier == "memory" else CachedStore(disk, limit)
    endpoint = serve(store, Policy(keep=1))
    payload = np.repeat(make_rows(Part.FORWARD, range(100)), 100, axis=0)
    with (
        RecordProducer(endpoint, resend_after_s=0.1) as engine,
        TraceClient(endpoint) as trainer,
    ):
        engine.register("e", layout)
        sent = 0
        for step in range(4):
            while not trainer.stats().full:
                rows = range(sent, sent + 10_000)
                engine.send_rows(Part.FORWARD, rows, payload, "v")
                sent += 10_000
                while engine.unacknowledged_bytes and not trainer.stats().full:
                    engine.poll()
            trainer.begin_step(step + 1)
            engine.flush(timeout_s=60)
            assert engine.acknowledged_rows == sent
    disk.close()


@pytest.mark.parametrize("step", range(2))
def test_a_full_disk_takes_the_news_of_a_step_too(small_disk: Path, step: int) -> None:
    store = DiskStore(small_disk / "store", 1 << 30)
    held: list[int] = []
    with pytest.raises(StoreFull):  # noqa: PT012
        while True:
            held += store.append([Entry(b"header", bytes(70_000 + step * 8_000))])
    assert store.append([Entry(b"a step", reserved=True)]) == [len(held)]
    store.delete(held)
    assert store.append([Entry(b"header", bytes(1_000_000))]) == [len(held) + 1]
    store.close()
