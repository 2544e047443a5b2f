"""Records spread over several bridges come back as from one; losing one loses only its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

from bridge.cli.app import app
from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import BridgeUnreachable, TraceError, UnknownTrajectory
from bridge.layout import Part, RecordLayout, Site
from bridge.producer.producer import Overflow, RecordProducer
from bridge.transport.bridge_sharding import (
    InvalidEndpoints,
    counts_of,
    parse_endpoints,
    row_number,
    shard_of,
    shards_of,
)
from bridge.wire import Policy
from tests.bridge.ranks import SHAPE, Ranks

LAYOUT = RecordLayout(SHAPE, (2, 3), (Site.FC1, Site.K, Site.V, Site.ROUTES), bits=1)
BRIDGES = 3
_TESTS = count()

MakeRows = Callable[..., NDArray[np.uint8]]


@pytest.fixture(scope="module")
def endpoints() -> Iterator[str]:
    bridges = [spawn.start() for _ in range(BRIDGES)]
    yield ",".join(bridge.endpoint for bridge in bridges)
    for bridge in bridges:
        bridge.stop()


@contextmanager
def producers(endpoints: str, engine: str, **options: Any) -> Iterator[RecordProducer]:
    with RecordProducer(endpoints, **options) as connected:
        connected.register(engine, LAYOUT, {2: (0.5, 2.0)})
        yield connected


def bytes_of(part: Part, rows: Iterable[int]) -> NDArray[np.uint8]:
    """Bytes that tell the part and the row's count."""
    counts = np.array(list(rows), dtype=np.int64)
    width = LAYOUT.row_bytes(part)
    return ((counts[:, None] * 7 + np.arange(width) * 3 + width) % 251).astype(np.uint8)


def name_at(home: int, bridges: int = BRIDGES, salt: str = "t") -> str:
    """A trajectory's name whose home is this bridge."""
    names = (f"{salt}-{number}" for number in count())
    return next(name for name in names if shard_of(name, bridges) == home)


class Rollout:
    """Trajectories of one engine, which computes each row for one of them and may use it again."""

    def __init__(self, connected: RecordProducer, bridges: int = BRIDGES) -> None:
        self._connected = connected
        self._bridges = bridges
        self.rows = 0
        self.of: dict[str, list[int]] = {}

    def compute(self, name: str, length: int, prefix: Iterable[int] = ()) -> None:
        """Extend a trajectory by rows that exist already and by new ones; send and tell it."""
        home = shard_of(name, self._bridges)
        new = [row_number(self.rows + i, home) for i in range(length)]
        self.rows += length
        self.of[name] = [*prefix, *new]
        for part in Part:
            if new:
                self._connected.send_rows(part, new, bytes_of(part, counts_of(np.array(new))), "v1")
        rows = self.of[name]
        self._connected.send_trajectory(name, 0, range(len(rows)), rows, "finished")


def assert_whole(records: Any, rows: list[int]) -> None:
    assert records.rows.tolist() == rows
    counts = counts_of(np.array(rows))
    for part, found, valid in (
        (Part.FORWARD, records.forward, records.forward_valid),
        (Part.KV, records.kv, records.kv_valid),
    ):
        assert valid.all()
        np.testing.assert_array_equal(found, bytes_of(part, counts))
    assert records.weight_versions == ("v1",)
    assert not records.weight_version_index.any()


@pytest.mark.usefixtures("through")
# What the fixture changes is the same for all examples.
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_sharing_of_rows_between_trajectories_of_several_bridges_comes_back_whole(
    endpoints: str, data: st.DataObject
) -> None:
    test = next(_TESTS)
    with producers(endpoints, f"engine{test}") as connected, TraceClient(endpoints) as client:
        before = client.stats()
        rollout = Rollout(connected)
        for number in range(data.draw(st.integers(1, 6))):
            known = list(rollout.of.values())
            prefix = known[data.draw(st.integers(0, number - 1))] if known else []
            shared = prefix[: data.draw(st.integers(0, len(prefix)))]
            name = name_at(data.draw(st.integers(0, BRIDGES - 1)), salt=f"p{test}/{number}")
            rollout.compute(name, data.draw(st.integers(1, 5)), shared)
        connected.flush()
        names = data.draw(st.permutations(list(rollout.of)))
        for name, records in zip(names, client.fetch_all(names), strict=True):
            assert_whole(records, rollout.of[name])
        after, listed = client.stats(), client.list_trajectories(f"p{test}/")
    # A row is stored once, however many trajectories and bridges it matters to.
    assert after.forward_rows - before.forward_rows == rollout.rows
    assert after.kv_rows - before.kv_rows == rollout.rows
    assert {item.trajectory: item.rows for item in listed} == {
        name: len(rows) for name, rows in rollout.of.items()
    }
    assert all(item.missing_forward == item.missing_kv == 0 for item in listed)


def test_only_the_positions_that_lie_elsewhere_are_asked_of_the_other_bridge(
    endpoints: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = name_at(0, salt="a"), name_at(1, salt="a")
    with producers(endpoints, "few") as connected, TraceClient(endpoints) as client:
        rollout = Rollout(connected)
        rollout.compute(first, 6)
        rollout.compute(second, 3, rollout.of[first][:4])
        connected.flush()
        asked: list[tuple[int, int | None]] = []
        for connection in client._connections:
            send = connection.send
            monkeypatch.setattr(
                connection,
                "send",
                lambda q, send=send: (asked.append((q.start, q.stop)), send(q))[1],
            )
        assert_whole(client.fetch(second), rollout.of[second])
        assert asked == [(0, None), (0, 4)]
        asked.clear()
        assert_whole(client.fetch(first), rollout.of[first])
        assert asked == [(0, None)]
        asked.clear()
        tail = client.fetch(second, start=2, stop=6)
        assert tail.forward_valid.all()
        assert asked == [(2, 6), (2, 4)]


def test_a_position_is_filled_only_by_the_row_that_the_home_names(endpoints: str) -> None:
    """Messages may reach bridges in different orders; another computation must not be served."""
    name, other = name_at(0, salt="b"), 1
    for number, told in ((0, 5), (other, 9)):
        with RecordProducer(parse_endpoints(endpoints)[number]) as producer:
            producer.register("odd", LAYOUT)
            rows = [row_number(5, other), row_number(9, other)]
            if number == other:
                producer.send_rows(Part.FORWARD, rows, bytes_of(Part.FORWARD, (5, 9)), "v1")
            producer.send_trajectory(name, 0, [1], [row_number(told, other)], "finished")
    with TraceClient(endpoints) as client:
        records = client.fetch(name)
    assert records.rows.tolist() == [row_number(5, other)]
    assert not records.forward_valid.any()


def test_trajectories_come_in_order_and_unknown_ones_as_none_or_an_error(
    endpoints: str, through: str
) -> None:
    with producers(endpoints, f"order {through}") as connected, TraceClient(endpoints) as client:
        rollout = Rollout(connected)
        for number in range(9):
            rollout.compute(f"{through} {number}", 2)
        connected.flush()
        names = [f"{through} 8", "lost", *(f"{through} {number}" for number in range(8))]
        found = list(client.fetch_all(names, allow_unknown=True))
        assert [None if each is None else each.trajectory for each in found] == [
            None if name == "lost" else name for name in names
        ]
        with pytest.raises(UnknownTrajectory, match="same bridges in the same order"):
            list(client.fetch_all(names))
        # The connections are of use after that.
        assert_whole(client.fetch(names[5]), rollout.of[names[5]])


def test_a_killed_bridge_costs_an_engine_that_may_drop_only_what_was_not_acknowledged(
    start_process: Callable[..., EmbeddedBridge], tmp_path: Path
) -> None:
    bridges = [start_process(tmp_path / str(number)) for number in range(BRIDGES)]
    endpoints = ",".join(bridge.endpoint for bridge in bridges)
    names = {home: name_at(home) for home in range(BRIDGES)}
    options = {"overflow": Overflow.DROP, "window_bytes": 4000, "resend_after_s": 0.2}
    with producers(endpoints, "e", **options) as connected, TraceClient(endpoints) as client:
        rollout = Rollout(connected)
        for home in range(BRIDGES):
            rollout.compute(names[home], 4)
        connected.flush()
        bridges[1].process.kill()
        bridges[1].process.wait()
        for home in range(BRIDGES):
            for turn in range(20):
                row = [row_number(1000 + 100 * home + turn, home)]
                for part in Part:
                    payload = bytes_of(part, counts_of(np.array(row)))
                    connected.send_rows(part, row, payload, "v1")
                _settle(connected, alive=(0, 2))
        dropped = connected.dropped_rows
        assert 0 < dropped.total() <= 40
        # The two others have lost nothing, and answer what the trainer asks of them.
        counts = Counter(_stats(bridges[home]).forward_rows for home in (0, 2))
        assert counts == {24: 2}
        with pytest.raises(BridgeUnreachable, match=bridges[1].endpoint):
            _ask_briefly(endpoints, names[1])
        assert_whole(_ask_briefly(endpoints, names[2]), rollout.of[names[2]])
        bridges[1] = start_process(tmp_path / "1", endpoint=bridges[1].endpoint)
        connected.flush()
        assert_whole(client.fetch(names[1]), rollout.of[names[1]])
        stats = client.stats()
        assert stats.dropped_rows == dropped.total()
        assert stats.forward_rows + stats.kv_rows + dropped.total() == 2 * (4 + 20) * BRIDGES


def _settle(connected: RecordProducer, alive: tuple[int, ...]) -> None:
    """Wait until the bridges that live have everything, so that only the dead one overflows."""
    end = time.monotonic() + 20
    while any(connected._links[home].unacknowledged_bytes for home in alive):
        assert time.monotonic() < end
        connected.poll()


def _stats(bridge: EmbeddedBridge) -> Any:
    with TraceClient(bridge.endpoint) as client:
        return client.stats()


def _ask_briefly(endpoints: str, name: str) -> Any:
    with TraceClient(endpoints, timeout_s=1.5) as client:
        return client.fetch(name)


def test_an_engine_that_may_not_drop_waits_for_a_killed_bridge_and_loses_nothing(
    start_process: Callable[..., EmbeddedBridge],
) -> None:
    """Even without a disk: what the bridge had not acknowledged is sent to the next one."""
    bridges = [start_process() for _ in range(2)]
    endpoints = ",".join(bridge.endpoint for bridge in bridges)
    with producers(endpoints, "e", resend_after_s=0.3, deadline_s=120) as connected:
        rollout = Rollout(connected, bridges=2)
        bridges[0].process.kill()
        bridges[0].process.wait()
        names = [name_at(home, 2, salt="c") for home in (0, 1)]
        for name in names:
            rollout.compute(name, 5)
        rollout.compute("shared", 2, [*rollout.of[names[0]][:3]])
        _settle(connected, alive=(1,))
        start_process(endpoint=bridges[0].endpoint)
        connected.flush()
        with TraceClient(endpoints) as client:
            for name, rows in rollout.of.items():
                assert_whole(client.fetch(name), rows)


def test_ranks_of_an_engine_spread_their_shares_of_rows_over_the_same_bridges(
    endpoints: str, through: str
) -> None:
    ranks = Ranks(RecordLayout(SHAPE, (1, 3), tuple(Site)), 6, tp=2, ep=2)
    names = [name_at(home, salt=f"rank {through}") for home in (0, 2)]
    rows = [row_number(i, (0, 2)[i % 2]) for i in range(6)]
    with ExitStack() as stack, TraceClient(endpoints) as client:
        for rank in range(ranks.tp):
            connected = stack.enter_context(RecordProducer(endpoints))
            connected.register(f"tp {through}", ranks.layout, shards=ranks.shards, shard=rank)
            for part in Part:
                if ranks.shards[rank].sends(part):
                    connected.send_rows(part, rows, ranks.sent(rank, part), "v1")
            connected.flush()
        for name in names:
            connected.send_trajectory(name, 0, range(6), rows, "finished")
        connected.flush()
        for name in names:
            records = client.fetch(name)
            assert records.forward_valid.all()
            np.testing.assert_array_equal(records.forward, ranks.whole(Part.FORWARD))
            np.testing.assert_array_equal(records.kv, ranks.whole(Part.KV))


def test_steps_pins_collection_and_digests_reach_every_bridge(
    start_process: Callable[..., EmbeddedBridge],
) -> None:
    bridges = [start_process() for _ in range(2)]
    endpoints = ",".join(bridge.endpoint for bridge in bridges)
    with producers(endpoints, "e") as connected, TraceClient(endpoints) as client:
        rollout = Rollout(connected, bridges=2)
        names = [name_at(home, 2, salt="d") for home in (0, 1)]
        for name in names:
            rollout.compute(name, 3)
        rollout.compute("pinned", 1, rollout.of[names[1 - shard_of("pinned", 2)]][:2])
        connected.send_digests("7", {"w": "00ff"})
        connected.flush()
        assert client.digests("7") == client.digests("7", "e") == {"w": "00ff"}
        client.pin(["pinned"])
        client.begin_step(3)
        assert [_stats(bridge).step for bridge in bridges] == [3, 3]
        assert client.gc(Policy(keep=1)).trajectories == 2
        assert [item.trajectory for item in client.list_trajectories()] == ["pinned"]
        # The bridge that is not its home kept the rows too: it knows who needs them.
        assert_whole(client.fetch("pinned"), rollout.of["pinned"])
        client.unpin(["pinned"])
        client.gc(Policy(keep=1))
        assert client.list_trajectories() == []
        assert client.stats().forward_rows == 0


def test_the_command_line_takes_several_bridges(endpoints: str) -> None:
    first, second = (name_at(home, salt="cli") for home in (0, 1))
    with producers(endpoints, "cli") as connected:
        rollout = Rollout(connected)
        rollout.compute(first, 3)
        rollout.compute(second, 1, rollout.of[first][:2])
        connected.flush()
    run = CliRunner().invoke
    shown = run(app, ["inspect", "cli-", "--endpoint", endpoints, "--json"])
    assert shown.exit_code == 0
    assert '"missing_forward": 0' in shown.stdout
    assert shown.stdout.count('"trajectory"') == 2
    top = run(app, ["top", "--endpoint", endpoints, "--json"])
    assert top.exit_code == 0
    assert top.stdout.count('"uptime_s"') == BRIDGES
    assert run(app, ["gc", "--endpoint", endpoints, "--keep", "1000000"]).exit_code == 0


class TestHomes:
    @settings(max_examples=30)
    @given(st.text(min_size=1, max_size=20), st.integers(1, 64))
    def test_a_home_is_one_of_the_bridges_and_stays(self, name: str, bridges: int) -> None:
        assert 0 <= shard_of(name, bridges) < bridges
        assert shard_of(name, bridges) == shard_of(str(name), bridges)

    def test_the_hash_is_the_same_on_every_machine_and_in_every_release(self) -> None:
        assert [shard_of(f"traj-{n}", 4) for n in range(8)] == [0, 2, 3, 1, 1, 2, 3, 3]

    def test_trajectories_spread_evenly(self) -> None:
        homes = Counter(shard_of(f"prompt-{n // 8}/{n % 8}", 4) for n in range(8000))
        assert all(1850 < homes[home] < 2150 for home in range(4))

    @given(st.integers(0, (1 << 48) - 1), st.integers(0, 63))
    def test_a_row_number_tells_count_and_home(self, number: int, home: int) -> None:
        row = row_number(number, home)
        assert (counts_of(row), shards_of(row)) == (number, home)
        assert shards_of(np.array([row, -1])).tolist() == [home, -1]
        assert row_number(number, 0) == number  # one bridge: rows are numbered as ever

    @pytest.mark.parametrize("text", ["", "a,", "a,,b", "a,b,a", ",".join(map(str, range(65)))])
    def test_lists_that_name_no_bridges_are_refused(self, text: str) -> None:
        with pytest.raises(InvalidEndpoints):
            parse_endpoints(text)

    def test_a_row_whose_home_is_not_in_the_list_is_refused(self, endpoints: str) -> None:
        rows, payload = [row_number(0, BRIDGES)], bytes_of(Part.FORWARD, [0])
        with (
            producers(endpoints, "beyond") as connected,
            pytest.raises(TraceError, match="names bridge 3 of 3"),
        ):
            connected.send_rows(Part.FORWARD, rows, payload, "v1")
