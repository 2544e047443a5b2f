"""What a trainer can rely on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.client.connection import Connection
from bridge.client.paging import Paging
from bridge.daemon.fetch.answer import Fetching
from bridge.daemon.spawn import EmbeddedBridge
from bridge.errors import BridgeUnreachable, LayoutError, TokenMismatch, UnknownTrajectory
from bridge.layout import Part, RecordLayout, Site
from bridge.producer.producer import RecordProducer
from bridge.store import MemoryStore
from bridge.transport.shared_memory import ShmSegment
from bridge.wire import Fetch, FetchReply, Policy

NOBODY = "tcp://127.0.0.1:9"


@pytest.fixture
def producer(endpoint: str, layout: RecordLayout) -> Iterator[RecordProducer]:
    with RecordProducer(endpoint) as connected:
        connected.register("e", layout, {2: (0.5, 0.25)})
        yield connected


@pytest.fixture
def client(endpoint: str, through: str) -> Iterator[TraceClient]:
    with TraceClient(endpoint) as connected:
        yield connected


@pytest.fixture
def recorded(producer: RecordProducer, make_rows: Callable[..., NDArray[np.uint8]]) -> None:
    """Trajectory "t": 10 tokens 100.., rows 0..8, the K/V of row 4 lost, weights changed at 6."""
    producer.send_rows(Part.FORWARD, range(6), make_rows(Part.FORWARD, range(6)), "v1")
    producer.send_rows(Part.FORWARD, range(6, 9), make_rows(Part.FORWARD, range(6, 9)), "v2")
    rows = [0, 1, 2, 3, 5, 6, 7, 8]
    producer.send_rows(Part.KV, rows, make_rows(Part.KV, rows), "v2")
    producer.send_trajectory("t", 0, range(100, 110), [*range(9), -1], "finished")
    producer.flush()


@pytest.mark.usefixtures("recorded")
def test_rows_come_back_where_they_were_recorded_and_missing_is_said(
    client: TraceClient, layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    records = client.fetch("t", expect_tokens=range(100, 110))
    assert (records.start, len(records), records.length, records.state) == (0, 10, 10, "finished")
    assert records.layout == layout
    assert records.kv_scales == {2: (0.5, 0.25)}
    assert records.forward_valid.tolist() == [True] * 9 + [False]
    assert records.kv_valid.tolist() == [True] * 4 + [False] + [True] * 4 + [False]
    np.testing.assert_array_equal(records.forward[:9], make_rows(Part.FORWARD, range(9)))
    np.testing.assert_array_equal(records.kv[5:9], make_rows(Part.KV, range(5, 9)))
    assert not records.kv[4].any()
    assert records.weight_versions == ("v1", "v2")
    assert records.weight_version_index.tolist() == [0] * 6 + [1] * 3 + [-1]
    assert records.engine_ids == ("e",)
    assert records.engine_index.tolist() == [0] * 9 + [-1]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("layers", [None, (2,), (3,), (2, 3)])
@pytest.mark.parametrize("sites", [None, (Site.FC1,), (Site.V, Site.ROUTES), (Site.K,)])
def test_a_fetch_of_some_layers_and_sites_has_their_bytes_of_the_full_row(
    client: TraceClient, layers: tuple[int, ...] | None, sites: tuple[Site, ...] | None
) -> None:
    full = client.fetch("t")
    some = client.fetch("t", layers=layers, sites=sites, start=2, stop=7)
    assert some.layout == full.layout.narrow(layers, sites)
    assert (some.start, len(some)) == (2, 5)
    for part, rows, of in (
        (Part.FORWARD, some.forward, full.forward),
        (Part.KV, some.kv, full.kv),
    ):
        assert rows.shape == (5, some.layout.row_bytes(part))
        for field in some.layout.fields(part):
            mine = some.layout.columns(field.site, field.layer)
            theirs = full.layout.columns(field.site, field.layer)
            np.testing.assert_array_equal(rows[:, mine], of[2:7, theirs])


@pytest.mark.usefixtures("recorded")
def test_what_is_not_recorded_cannot_be_asked_for(client: TraceClient) -> None:
    with pytest.raises(LayoutError, match="layers"):
        client.fetch("t", layers=(0,))
    with pytest.raises(LayoutError, match="fc2"):
        client.fetch("t", sites=(Site.FC2,))
    with pytest.raises(LayoutError, match="ask for some of"):
        client.fetch("t", sites=("fc7",))  # type: ignore[arg-type]


@pytest.mark.usefixtures("recorded")
def test_a_long_trajectory_comes_in_pages_that_join_seamlessly(
    client: TraceClient, small_pages: Callable[[int, int], None]
) -> None:
    whole = client.fetch("t")
    small_pages(500, 150)
    paged = client.fetch("t", start=1)
    for name in ("tokens", "forward", "forward_valid", "kv", "kv_valid", "weight_version_index"):
        np.testing.assert_array_equal(getattr(paged, name), getattr(whole, name)[1:])
    assert paged.weight_versions == whole.weight_versions


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("start", "tokens", "why"),
    [
        (0, [100, 101, 7], "token 102 at position 2 and the trainer 7"),
        (5, [105, 7], "token 106 at position 6"),
        (0, range(100, 111), "has 10 tokens and positions 0 to 11"),
        (20, [120], "has 10 tokens"),
    ],
)
def test_records_of_other_tokens_are_never_returned(
    client: TraceClient, start: int, tokens: list[int], why: str
) -> None:
    with pytest.raises(TokenMismatch, match=why):
        client.fetch("t", start=start, expect_tokens=tokens)


@pytest.mark.usefixtures("recorded")
def test_fewer_expected_tokens_fetch_just_these(client: TraceClient) -> None:
    assert client.fetch("t", start=3, expect_tokens=[103, 104]).tokens.tolist() == [103, 104]


@pytest.mark.usefixtures("recorded")
def test_positions_behind_the_end_are_not_there(client: TraceClient) -> None:
    assert len(client.fetch("t", start=8, stop=100)) == 2
    assert len(client.fetch("t", start=50)) == 0


def test_rows_named_before_they_arrive_are_missing_until_then(
    producer: RecordProducer, client: TraceClient, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    producer.send_trajectory("t", 0, [5, 6], [0, 1], "open")
    producer.flush()
    assert not client.fetch("t").forward_valid.any()
    producer.send_rows(Part.FORWARD, [1], make_rows(Part.FORWARD, [1]), "v")
    producer.flush()
    assert client.fetch("t").forward_valid.tolist() == [False, True]


def test_a_shared_prompt_is_stored_once_and_found_in_every_trajectory(
    producer: RecordProducer, client: TraceClient, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    payload = make_rows(Part.FORWARD, range(6))
    producer.send_rows(Part.FORWARD, range(6), payload, "v")
    producer.send_trajectory("a", 0, [1, 2, 3, 4], [0, 1, 2, 3], "finished")
    producer.send_trajectory("b", 0, [1, 2, 3, 9], [0, 1, 2, 5], "finished")
    producer.flush()
    np.testing.assert_array_equal(client.fetch("b").forward, payload[[0, 1, 2, 5]])
    assert client.stats().forward_rows == 6


def test_two_engines_may_compute_one_trajectory_and_a_third_format_is_missing(
    endpoint: str,
    producer: RecordProducer,
    client: TraceClient,
    layout: RecordLayout,
    make_rows: Callable[..., NDArray[np.uint8]],
) -> None:
    producer.send_rows(Part.FORWARD, [0], make_rows(Part.FORWARD, [0], "e"), "v")
    producer.send_trajectory("t", 0, [5, 6], [0, -1], "open")
    producer.flush()
    with RecordProducer(endpoint) as other:
        other.register("f", layout, {2: (0.5, 0.25)})
        other.send_rows(Part.FORWARD, [0, 1], make_rows(Part.FORWARD, [0, 1], "f"), "v")
        other.send_trajectory("t", 0, [5, 6, 7], [0, 1, -1], "finished")
    records = client.fetch("t")
    assert [records.engine_ids[index] for index in records.engine_index[:2]] == ["e", "f"]
    np.testing.assert_array_equal(records.forward[0], make_rows(Part.FORWARD, [0], "e")[0])
    np.testing.assert_array_equal(records.forward[1], make_rows(Part.FORWARD, [1], "f")[0])
    with RecordProducer(endpoint) as third:
        third.register("g", layout.narrow(sites=(Site.FC1,)))
        third.send_trajectory("t", 2, [7], [0], "finished")
    assert client.fetch("t").forward_valid.tolist() == [False, False, False]
    assert client.fetch("t").layout.sites == (Site.FC1,)


def test_digests_are_told_by_weight_version_and_the_last_report_counts(
    endpoint: str, producer: RecordProducer, client: TraceClient, layout: RecordLayout
) -> None:
    producer.send_digests("v1", {"a": "00", "b": "11"})
    producer.flush()
    with RecordProducer(endpoint) as other:
        other.register("f", layout)
        other.send_digests("v1", {"a": "22"})
    assert client.digests("v1") == {"a": "22", "b": "11"}
    assert client.digests("v1", "e") == {"a": "00", "b": "11"}
    assert client.digests("v9") == {}
    producer.send_digests("v1", {"a": "33"})
    producer.flush()
    assert client.digests("v1") == {"a": "33", "b": "11"}


@pytest.mark.usefixtures("recorded")
def test_a_list_has_every_trajectory_with_what_is_held_of_it(
    producer: RecordProducer,
    client: TraceClient,
    layout: RecordLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.daemon.queries._LIST_PAGE", 2)
    for number in range(4):
        producer.send_trajectory(f"other{number}", 0, [1], [-1], "aborted")
    producer.flush()
    found = {item.trajectory: item for item in client.list_trajectories()}
    assert list(found) == ["t", "other0", "other1", "other2", "other3"]
    assert [item.trajectory for item in client.list_trajectories("other3")] == ["other3"]
    item = found["t"]
    assert (item.tokens, item.rows, item.missing_forward, item.missing_kv) == (10, 9, 0, 1)
    assert item.weight_versions == ("v1", "v2")
    assert item.nbytes == 9 * layout.row_bytes(Part.FORWARD) + 8 * layout.row_bytes(Part.KV)
    assert (found["other0"].missing_forward, found["other0"].missing_kv) == (0, 0)


def test_many_trajectories_come_in_order_ahead_of_their_reader(
    producer: RecordProducer,
    client: TraceClient,
    make_rows: Callable[..., NDArray[np.uint8]],
    small_pages: Callable[[int, int], None],
) -> None:
    small_pages(500, 150)
    payload = make_rows(Part.FORWARD, range(60))
    producer.send_rows(Part.FORWARD, range(60), payload, "v")
    for number in range(4):
        rows = range(number * 15, (number + 1) * 15)
        producer.send_trajectory(f"t{number}", 0, rows, rows, "finished")
    producer.flush()
    names = ["t2", "nope", "t0", "t3", "nope", "t1"]
    found = list(client.fetch_all(names, allow_unknown=True))
    for name, records in zip(names, found, strict=True):
        if name == "nope":
            assert records is None
        else:
            assert records is not None
            first = int(name[1:]) * 15
            np.testing.assert_array_equal(records.forward, payload[first : first + 15])
    refused = client.fetch_all(names)
    assert next(refused) is not None
    with pytest.raises(UnknownTrajectory):
        next(refused)
    given_up = client.fetch_all(names[2:4])
    next(given_up)
    given_up.close()  # type: ignore[attr-defined]
    assert client.fetch("t1").tokens.tolist() == list(range(15, 30))


def test_a_trajectory_told_anew_between_two_pages_is_read_again(
    producer: RecordProducer,
    client: TraceClient,
    make_rows: Callable[..., NDArray[np.uint8]],
    small_pages: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_pages(500, 150)
    payload = make_rows(Part.FORWARD, range(80))
    producer.send_rows(Part.FORWARD, range(80), payload, "v")
    producer.send_trajectory("t", 0, range(40), range(40), "open")
    producer.flush()
    told: list[bool] = []
    reply = Connection.receive

    def meddling(self: Connection, *arguments: Any) -> Any:
        page = reply(self, *arguments)
        if not told:
            told.append(True)
            producer.send_trajectory("t", 0, range(1, 41), range(40, 80), "finished")
            producer.flush()
        return page

    monkeypatch.setattr(Connection, "receive", meddling)
    records = client.fetch("t")
    assert records.tokens.tolist() == list(range(1, 41))
    np.testing.assert_array_equal(records.forward, payload[40:])


def test_pages_of_lent_memory_may_be_larger_than_those_of_the_socket_that_follow_them(
    producer: RecordProducer,
    endpoint: str,
    make_rows: Callable[..., NDArray[np.uint8]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all places are lent, a page is asked for that the socket's limit cuts short."""
    monkeypatch.setattr("bridge.daemon.fetch.answer.MAX_PAGE_BYTES", 500)
    monkeypatch.setattr(
        "bridge.client.shm_receiver.ShmSegment", lambda: ShmSegment(buffers=1, buffer_bytes=3000)
    )
    payload = make_rows(Part.FORWARD, range(80))
    producer.send_rows(Part.FORWARD, range(80), payload, "v")
    producer.send_trajectory("t", 0, range(80), range(80), "finished")
    producer.flush()
    with TraceClient(endpoint) as client:
        for _ in range(2):
            records = client.fetch("t")
            assert records.tokens.tolist() == list(range(80))
            assert records.forward_valid.all()
            np.testing.assert_array_equal(records.forward, payload)


def test_a_client_that_does_not_read_holds_up_nobody_and_gets_everything_later(
    serve: Callable[..., str], layout: RecordLayout
) -> None:
    endpoint = serve(MemoryStore(64 << 20))
    payload = np.ones((20_000, layout.row_bytes(Part.FORWARD)), dtype=np.uint8)
    with RecordProducer(endpoint) as engine:
        engine.register("e", layout)
        engine.send_rows(Part.FORWARD, range(20_000), payload, "v")
        engine.send_trajectory("t", 0, range(20_000), range(20_000), "finished")
    with TraceClient(endpoint) as reader, closing(Connection(endpoint)) as stalled:
        asked = [stalled.send(Fetch("t")) for _ in range(200)]
        for _ in range(3):
            assert len(reader.fetch("t")) == 20_000
        paging = Paging(stalled, time.monotonic() + 60)
        for seq in asked:
            page = stalled.receive(seq, FetchReply, paging.end)
            pieces = list(paging.rows(page, seq))
            assert sum(len(piece.rows) for piece in pieces) == len(page.tokens)
            assert all(piece.rows.min() == 1 for piece in pieces if len(piece.rows))


@pytest.mark.usefixtures("through")
def test_rows_that_are_given_up_while_a_client_reads_them_arrive_as_they_were(
    serve: Callable[..., str], layout: RecordLayout
) -> None:
    endpoint = serve(MemoryStore(64 << 20))
    old, new = (
        np.full((20_000, layout.row_bytes(Part.FORWARD)), fill, np.uint8) for fill in (1, 2)
    )
    with (
        RecordProducer(endpoint) as engine,
        TraceClient(endpoint) as trainer,
        closing(Connection(endpoint)) as reader,
    ):
        engine.register("e", layout)
        engine.send_rows(Part.FORWARD, range(20_000), old, "v")
        engine.send_trajectory("t", 0, range(20_000), range(20_000), "finished")
        engine.flush()
        paging = Paging(reader, time.monotonic() + 60)
        asked = reader.send(Fetch("t"))
        head = reader.receive(asked, FetchReply, paging.end)
        for step in (1, 2):
            trainer.begin_step(step)
        trainer.gc(Policy(keep=1))
        engine.send_rows(Part.FORWARD, range(20_000, 40_000), new, "v")
        engine.flush()
        with pytest.raises(UnknownTrajectory):
            trainer.fetch("t")
        pieces = [piece.rows for piece in paging.rows(head, asked) if piece.part is Part.FORWARD]
    assert sum(map(len, pieces)) == len(head.tokens) > 10_000
    assert all((rows == 1).all() for rows in pieces)


def test_an_unknown_trajectory_is_named(client: TraceClient) -> None:
    with pytest.raises(UnknownTrajectory, match="holds no trajectory 'nope'"):
        client.fetch("nope")


def test_no_bridge_ends_in_a_sentence_with_the_command() -> None:
    with (
        TraceClient(NOBODY, timeout_s=0.2) as client,
        pytest.raises(BridgeUnreachable, match=f"python -m bridge serve --endpoint {NOBODY}"),
    ):
        client.ping()


@pytest.mark.timeout(30)
def test_a_client_whose_connection_was_given_up_says_so_and_goes_on(endpoint: str) -> None:
    with TraceClient(endpoint, timeout_s=0.3) as client:
        client._connections[0]._socket.disconnect(endpoint)
        with pytest.raises(BridgeUnreachable):
            client.ping()
        client.ping()


def test_a_client_goes_on_after_a_timeout(start_process: Callable[..., EmbeddedBridge]) -> None:
    bridge = start_process()
    with TraceClient(bridge.endpoint) as client:
        client.ping()
        os.kill(bridge.process.pid, signal.SIGSTOP)
        with pytest.raises(BridgeUnreachable):
            client.fetch("t", timeout_s=0.1)
        os.kill(bridge.process.pid, signal.SIGCONT)
        client.ping()


@pytest.mark.usefixtures("recorded")
def test_ranges_come_in_their_order_and_only_they_travel(
    client: TraceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    head = Fetching._head

    def counting(*arguments: Any) -> FetchReply:
        reply = head(*arguments)
        sent.append(len(reply.tokens))
        return reply

    monkeypatch.setattr(Fetching, "_head", counting)
    whole = client.fetch("t")
    sent.clear()
    # The chunks of the second of two context-parallel ranks.
    first, second = client.fetch_ranges("t", [(2, 5), (5, 7)], sites=(Site.FC1,))
    assert sum(sent) == 5
    assert (first.start, len(first), second.start, len(second)) == (2, 3, 5, 2)
    fc1 = whole.layout.columns(Site.FC1, 2).start
    assert first.tokens.tolist() + second.tokens.tolist() == [102, 103, 104, 105, 106]
    np.testing.assert_array_equal(
        np.concatenate([first.forward, second.forward]),
        whole.forward[2:7, fc1 : fc1 + first.forward.shape[1]],
    )


def test_ranges_are_of_one_revision_of_the_trajectory(
    producer: RecordProducer,
    client: TraceClient,
    make_rows: Callable[..., NDArray[np.uint8]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producer.send_rows(Part.FORWARD, range(4), make_rows(Part.FORWARD, range(4)), "v1")
    producer.send_trajectory("t", 0, range(4), range(4), "open")
    producer.flush()
    read, told = client._read, []

    def between(fetches: list[Fetch], *arguments: Any) -> Iterator[Any]:
        for records in read(fetches, *arguments):
            yield records
            if not told:
                told.append(True)
                producer.send_trajectory("t", 0, [7, 8, 9, 10], range(4), "finished")
                producer.flush()

    monkeypatch.setattr(client, "_read", between)
    monkeypatch.setattr("bridge.client.paging._TRAJECTORIES_AHEAD", 1)
    ranges = client.fetch_ranges("t", [(0, 2), (2, 4)])
    assert [records.tokens.tolist() for records in ranges] == [[7, 8], [9, 10]]
