"""Rows that several ranks of an engine send in parts come back whole, or are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.errors import LayoutError, SchemaMismatch
from bridge.layout import Part, RecordLayout, Shard, Site, TensorSlice
from bridge.layout.rank_shards import rank_shards
from bridge.layout.shard import check_shards
from bridge.producer.producer import RecordProducer
from bridge.store import MemoryStore
from bridge.wire import Hello, Policy, decode, encode
from tests.bridge.ranks import SHAPE, Ranks

LAYOUT = RecordLayout(SHAPE, (1, 3), tuple(Site), bits=1)
SIZES = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)]
_SIZES = st.sampled_from(SIZES)
_NAMES = count()
# What it changes is the same for all examples.
_THROUGH = [HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def shared_endpoint() -> Iterator[str]:
    bridge = spawn.start()
    yield bridge.endpoint
    bridge.stop()


@contextmanager
def producers(endpoint: str, ranks: Ranks, engine: str) -> Iterator[list[RecordProducer]]:
    """One connection a rank, each having said hello."""
    with ExitStack() as stack:
        connected = [stack.enter_context(RecordProducer(endpoint)) for _ in range(ranks.tp)]
        for rank, producer in enumerate(connected):
            producer.register(
                engine, ranks.layout, {1: (0.5, 2.0)}, shards=ranks.shards, shard=rank
            )
        yield connected


def send(producer: RecordProducer, ranks: Ranks, rank: int, part: Part, rows: Any) -> None:
    at = np.array(rows)
    producer.send_rows(part, at, ranks.sent(rank, part)[at], "v1")


def send_all(
    connected: list[RecordProducer], ranks: Ranks, lost: tuple[int, Part] | None = None
) -> None:
    """Send all rows of all ranks, but for one (rank, part)."""
    for rank, producer in enumerate(connected):
        for part in Part:
            if ranks.shards[rank].sends(part) and (rank, part) != lost:
                send(producer, ranks, rank, part, range(ranks.rows))
        producer.flush()


def deliver(endpoint: str, ranks: Ranks, name: str) -> None:
    """Send an engine's rows and the trajectory that they are."""
    with producers(endpoint, ranks, name) as connected:
        send_all(connected, ranks)
        tell(connected[0], ranks, name)


def tell(producer: RecordProducer, ranks: Ranks, name: str) -> None:
    producer.send_trajectory(name, 0, range(ranks.rows), range(ranks.rows), "finished")
    producer.flush()


@pytest.mark.usefixtures("through")
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(("tp", "ep"), SIZES)
def test_every_split_joins_to_the_undivided_rows(
    shared_endpoint: str, tp: int, ep: int, heads: int
) -> None:
    """Four heads are split over four ranks, two are repeated."""
    layout = replace(LAYOUT, shape=replace(SHAPE, num_kv_heads=heads))
    check_split(shared_endpoint, layout, tp, ep)


@pytest.mark.parametrize(("tp", "ep"), SIZES)
def test_every_split_of_low_scales_joins_to_the_undivided_rows(
    shared_endpoint: str, tp: int, ep: int
) -> None:
    """Every rank has whole bytes of scales: 64 values, or a multiple."""
    shape = replace(SHAPE, num_kv_heads=4, head_dim=64, moe_intermediate_size=256)
    check_split(shared_endpoint, replace(LAYOUT, shape=shape, scale_bits=2), tp, ep)


def check_split(shared_endpoint: str, layout: RecordLayout, tp: int, ep: int) -> None:
    ranks, name = Ranks(layout, 30, tp, ep), f"split-{next(_NAMES)}"
    deliver(shared_endpoint, ranks, name)
    with TraceClient(shared_endpoint) as client:
        records = client.fetch(name)
    assert records.forward_valid.all()
    assert records.kv_valid.all()
    np.testing.assert_array_equal(records.forward, ranks.whole(Part.FORWARD))
    np.testing.assert_array_equal(records.kv, ranks.whole(Part.KV))


@pytest.mark.usefixtures("through")
@settings(max_examples=20, suppress_health_check=_THROUGH)
@given(st.data())
def test_any_split_in_any_order_with_repetitions_joins_to_the_undivided_rows(
    shared_endpoint: str, data: st.DataObject
) -> None:
    (tp, ep), bits = data.draw(_SIZES), data.draw(st.integers(1, 4))
    shape = replace(SHAPE, num_kv_heads=data.draw(st.sampled_from([2, 4])))
    layout = replace(LAYOUT, shape=shape, bits=bits)
    ranks = Ranks(layout, data.draw(st.integers(1, 9)), tp, ep, seed=data.draw(st.integers(0, 99)))
    cut = data.draw(st.integers(0, ranks.rows))
    chunks = [
        (rank, part, rows)
        for rank in range(tp)
        for part in Part
        for rows in (range(cut), range(cut, ranks.rows))
        if ranks.shards[rank].sends(part) and len(rows)
    ]
    lost = data.draw(st.none() | st.sampled_from(chunks))
    again = data.draw(st.lists(st.sampled_from(chunks), max_size=4))
    order = data.draw(st.permutations(chunks + again))
    name = f"t{next(_NAMES)}"
    with producers(shared_endpoint, ranks, name) as connected:
        for rank, part, rows in order:
            if (rank, part, rows) != lost:
                send(connected[rank], ranks, rank, part, rows)
        for producer in connected:
            producer.flush()
        tell(connected[-1], ranks, name)
    with TraceClient(shared_endpoint) as client:
        records = client.fetch(name)
    for part, rows, valid in (
        (Part.FORWARD, records.forward.numpy(), records.forward_valid.numpy()),
        (Part.KV, records.kv.numpy(), records.kv_valid.numpy()),
    ):
        expected = np.ones(ranks.rows, dtype=bool)
        if lost is not None and lost[1] is part:
            expected[list(lost[2])] = False
        np.testing.assert_array_equal(valid, expected)
        np.testing.assert_array_equal(rows[valid], ranks.whole(part)[valid])
        assert not rows[~valid].any()


@pytest.mark.usefixtures("through")
@settings(max_examples=20, suppress_health_check=_THROUGH)
@given(st.data())
def test_a_narrowed_fetch_has_the_bytes_of_the_undivided_rows(
    shared_endpoint: str, data: st.DataObject
) -> None:
    ranks = Ranks(LAYOUT, 3, *data.draw(_SIZES))
    name = f"narrow-{ranks.tp}-{ranks.ep}"
    with TraceClient(shared_endpoint) as client:
        if not client.list_trajectories(name):
            deliver(shared_endpoint, ranks, name)
        kept = data.draw(st.sets(st.sampled_from(list(Site)), min_size=1))
        narrowed = LAYOUT.narrow(
            data.draw(st.sampled_from([None, (1,), (3,)])),
            kept,
            TensorSlice(
                data.draw(st.sampled_from([None, (0, 16), (16, 64), (32, 48)])),
                data.draw(st.sampled_from([None, (0, 1), (1, 2)])),
            ),
        )
        records = client.fetch(
            name, layers=narrowed.layers, sites=kept, tensor_slice=narrowed.tensor_slice
        )
    assert records.layout == narrowed
    for part, rows in ((Part.FORWARD, records.forward), (Part.KV, records.kv)):
        np.testing.assert_array_equal(rows, ranks.whole(part, narrowed))


@pytest.mark.usefixtures("through")
def test_a_rank_that_has_not_sent_makes_rows_missing_for_everyone_and_they_are_counted(
    endpoint: str,
) -> None:
    ranks = Ranks(LAYOUT, 5, tp=2, ep=2)
    with producers(endpoint, ranks, "e") as connected, TraceClient(endpoint) as client:
        send_all(connected, ranks, lost=(1, Part.FORWARD))
        tell(connected[0], ranks, "t")
        # The first rank holds all routes, and yet no trainer rank may find the rows complete.
        routes = client.fetch("t", sites=(Site.ROUTES,))
        assert not routes.forward_valid.any()
        assert not routes.forward.any()
        assert client.fetch("t").kv_valid.all()
        stats = client.stats()
        assert (stats.forward_rows, stats.kv_rows, stats.partial_rows) == (0, 5, 5)
        (summary,) = client.list_trajectories()
        assert (summary.rows, summary.missing_forward, summary.missing_kv) == (0, 5, 0)
        send(connected[1], ranks, 1, Part.FORWARD, range(5))
        connected[1].flush()
        stats = client.stats()
        assert (stats.forward_rows, stats.kv_rows, stats.partial_rows) == (5, 5, 0)
        np.testing.assert_array_equal(client.fetch("t").forward, ranks.whole(Part.FORWARD))


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 2)])
def test_ranks_that_disagree_on_what_they_both_send_make_the_row_missing(
    shared_endpoint: str, tp: int, ep: int
) -> None:
    ranks = Ranks(LAYOUT, 4, tp, ep, seed=2)
    name = f"disagree-{tp}-{ep}"
    with producers(shared_endpoint, ranks, name) as connected:
        for rank, producer in enumerate(connected):
            shard = ranks.shards[rank]
            rows = ranks.whole(Part.FORWARD, shard.layout)
            computed = ranks.owners() == rank // (tp // ep)
            if rank == 1:  # it splits experts with rank 0: both send their scales of a token
                slot = int(np.flatnonzero(computed[2])[0])
                layer, within = divmod(slot, SHAPE.top_k)
                held = shard.layout.columns(Site.FC2, LAYOUT.layers[layer])
                each = (held.stop - held.start) // SHAPE.top_k
                rows[2, held.start + (within + 1) * each - 1] ^= 1
            sent = shard.pack(rows, computed) if shard.by_slot else rows
            producer.send_rows(Part.FORWARD, range(4), sent, "v1")
            producer.flush()
        tell(connected[0], ranks, name)
    with TraceClient(shared_endpoint) as client:
        assert client.fetch(name).forward_valid.tolist() == [True, True, False, True]


def test_ranks_that_computed_a_row_with_other_weights_make_it_missing(shared_endpoint: str) -> None:
    ranks = Ranks(LAYOUT, 4, tp=2, ep=1)
    with producers(shared_endpoint, ranks, "versions") as connected:
        for rank, producer in enumerate(connected):
            for part in Part:
                sent = ranks.sent(rank, part)
                producer.send_rows(part, range(2), sent[:2], "v1")
                producer.send_rows(part, range(2, 4), sent[2:], f"v{1 + rank}")
            producer.flush()
        tell(connected[0], ranks, "versions")
    with TraceClient(shared_endpoint) as client:
        records = client.fetch("versions")
    assert records.forward_valid.tolist() == records.kv_valid.tolist() == [True, True, False, False]


def test_a_slot_that_no_rank_or_two_ranks_computed_makes_the_row_missing(
    shared_endpoint: str,
) -> None:
    ranks = Ranks(LAYOUT, 4, tp=2, ep=2)
    with producers(shared_endpoint, ranks, "slots") as connected:
        for rank, producer in enumerate(connected):
            shard = ranks.shards[rank]
            computed = ranks.owners() == rank
            computed[1, 0] = False
            computed[2, 4] = True
            rows = shard.pack(ranks.whole(Part.FORWARD, shard.layout), computed)
            producer.send_rows(Part.FORWARD, range(4), rows, "v1")
            producer.flush()
        tell(connected[0], ranks, "slots")
    with TraceClient(shared_endpoint) as client:
        assert client.fetch("slots").forward_valid.tolist() == [True, False, False, True]


def test_large_rows_of_slots_are_unpacked_piece_by_piece(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bridge.daemon.fetch.rank_join._CHUNK_BYTES", 3 * LAYOUT.row_bytes(Part.FORWARD)
    )
    endpoint, ranks = serve(MemoryStore(64 << 20)), Ranks(LAYOUT, 20, tp=4, ep=4)
    unpacked: list[int] = []
    unpack = Shard.unpacked

    def counting(shard: Shard, packed: NDArray[np.uint8]) -> Any:
        unpacked.append(len(packed))
        return unpack(shard, packed)

    monkeypatch.setattr(Shard, "unpacked", counting)
    deliver(endpoint, ranks, "t")
    with TraceClient(endpoint) as client:
        np.testing.assert_array_equal(client.fetch("t").forward, ranks.whole(Part.FORWARD))
        assert sum(unpacked) == 4 * 20
        assert max(unpacked) < 20
        unpacked.clear()
        routes = client.fetch("t", sites=(Site.ROUTES,))
    assert not unpacked
    expected = ranks.whole(Part.FORWARD, LAYOUT.narrow(sites=(Site.ROUTES,)))
    np.testing.assert_array_equal(routes.forward, expected)


def test_acknowledged_shards_survive_a_killed_daemon_and_the_rest_completes_them(
    start_process: Callable[..., spawn.EmbeddedBridge], tmp_path: Path
) -> None:
    ranks = Ranks(LAYOUT, 6, tp=4, ep=2)
    bridge = start_process(tmp_path)
    with (
        producers(bridge.endpoint, ranks, "e") as connected,
        TraceClient(bridge.endpoint) as client,
    ):
        send_all(connected, ranks, lost=(3, Part.FORWARD))
        tell(connected[0], ranks, "t")
        bridge.process.kill()
        bridge.process.wait()
        start_process(tmp_path, endpoint=bridge.endpoint)
        assert not client.fetch("t").forward_valid.any()
        assert client.stats().partial_rows == 6
        send(connected[3], ranks, 3, Part.FORWARD, range(6))
        connected[3].flush()
        records = client.fetch("t")
    assert records.forward_valid.all()
    np.testing.assert_array_equal(records.forward, ranks.whole(Part.FORWARD))


def test_collecting_keeps_every_ranks_bytes_of_what_is_pinned_and_gives_up_the_others(
    serve: Callable[..., str],
) -> None:
    endpoint = serve(MemoryStore(64 << 20), Policy(keep=1))
    ranks = Ranks(LAYOUT, 5, tp=4, ep=4)
    with TraceClient(endpoint) as client:
        for name in ("kept", "old"):
            deliver(endpoint, ranks, name)
        client.pin(["kept"])
        client.begin_step(2)
        deadline = time.monotonic() + 10
        while client.stats().collected == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        records = client.fetch("kept")
        assert records.forward_valid.all()
        assert records.kv_valid.all()
        np.testing.assert_array_equal(records.forward, ranks.whole(Part.FORWARD))
        stats = client.stats()
        assert (stats.trajectories, stats.forward_rows, stats.partial_rows) == (1, 5, 0)


@pytest.mark.usefixtures("through")
@pytest.mark.parametrize("rows_a_piece", [1, 3, 50])
def test_rows_of_one_rank_and_of_several_come_in_one_page(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch, rows_a_piece: int
) -> None:
    """Two engines computed a trajectory in turns; a rank of one of them lost rows."""
    chunk = rows_a_piece * LAYOUT.row_bytes(Part.FORWARD)
    monkeypatch.setattr("bridge.daemon.fetch.answer.CHUNK_BYTES", chunk)
    endpoint = serve(MemoryStore(64 << 20))
    one, two = Ranks(LAYOUT, 20, tp=1, ep=1), Ranks(LAYOUT, 20, tp=2, ep=2, seed=1)
    by_two = np.random.default_rng(3).integers(0, 2, 20).astype(np.bool_)
    lost = by_two & (np.arange(20) % 3 == 0)
    with producers(endpoint, one, "one") as whole, producers(endpoint, two, "two") as shared:
        send_all(whole, one)
        send(shared[0], two, 0, Part.FORWARD, range(20))
        send(shared[1], two, 1, Part.FORWARD, np.flatnonzero(~lost))
        for rank in range(2):
            send(shared[rank], two, rank, Part.KV, range(20))
            shared[rank].flush()
        for at, engine in enumerate(np.where(by_two, shared[0], whole[0]).tolist()):
            engine.send_trajectory("t", at, [at], [at], "finished")
            engine.flush()
    with TraceClient(endpoint) as client:
        records = client.fetch("t")
        routes = client.fetch("t", sites=(Site.ROUTES,))
    np.testing.assert_array_equal(records.forward_valid, ~lost)
    assert records.kv_valid.all()
    for part, rows, missing in (
        (Part.FORWARD, records.forward, lost),
        (Part.KV, records.kv, np.zeros(20, np.bool_)),
    ):
        expected = np.where(by_two[:, None], two.whole(part), one.whole(part))
        np.testing.assert_array_equal(rows, np.where(missing[:, None], 0, expected))
    assert routes.kv.shape == (20, 0)
    np.testing.assert_array_equal(routes.forward_valid, ~lost)


def test_data_parallel_ranks_are_engines_whose_rows_do_not_meet(shared_endpoint: str) -> None:
    ranks = [Ranks(LAYOUT, 4, tp=2, ep=1, seed=seed) for seed in (1, 2)]
    for dp, replica in enumerate(ranks):
        deliver(shared_endpoint, replica, f"run.dp{dp}")
    with TraceClient(shared_endpoint) as client:
        for dp, replica in enumerate(ranks):
            records = client.fetch(f"run.dp{dp}")
            np.testing.assert_array_equal(records.forward, replica.whole(Part.FORWARD))
            assert records.engine_ids == (f"run.dp{dp}",)


class TestIntroduction:
    def test_shards_that_leave_bytes_out_are_refused(self) -> None:
        first, second = rank_shards(LAYOUT, 2)
        check_shards(LAYOUT, (first, second))
        with pytest.raises(LayoutError, match="bytes of a forward row"):
            check_shards(LAYOUT, (first, first))
        with pytest.raises(LayoutError, match="bytes of a kv row"):
            check_shards(
                LAYOUT, (first, replace(second, layout=second.layout.narrow(sites=["fc2"])))
            )
        slots = rank_shards(LAYOUT, 2, 2)
        with pytest.raises(LayoutError, match="slots of the same layers"):
            check_shards(LAYOUT, (*slots, replace(slots[1], layout=slots[1].layout.narrow((3,)))))
        with pytest.raises(SchemaMismatch, match="shards"):
            decode([bytes(f) for f in encode(Hello("e", LAYOUT, shards=(first, first)), 0)])

    def test_a_model_that_cannot_be_split_so_is_refused(self) -> None:
        with pytest.raises(LayoutError, match="3 ranks cannot form 2"):
            rank_shards(LAYOUT, 3, 2)
        with pytest.raises(LayoutError, match="2 KV heads cannot be repeated equally on 3"):
            rank_shards(LAYOUT, 3)
        with pytest.raises(LayoutError, match="multiples of 16"):
            rank_shards(LAYOUT, 8)  # an eighth of the experts' width is 8 values

    def test_the_first_rank_sends_what_is_the_same_on_all_and_heads_go_once(self) -> None:
        shards = rank_shards(LAYOUT, 4)
        assert [Site.ROUTES in shard.layout.sites for shard in shards] == [True] + [False] * 3
        assert [Site.FC1 in shard.layout.sites for shard in shards] == [True] + [False] * 3
        heads = [s.layout.tensor_slice.heads if s.sends(Part.KV) else None for s in shards]
        assert heads == [(0, 1), None, (1, 2), None]

    def test_ranks_that_describe_the_engine_differently_are_refused(
        self, shared_endpoint: str
    ) -> None:
        shards = rank_shards(LAYOUT, 2)
        with RecordProducer(shared_endpoint) as producer:
            producer.register("odd", LAYOUT, shards=shards, shard=0)
        with (
            RecordProducer(shared_endpoint) as other,
            pytest.raises(SchemaMismatch, match="same layout, shards"),
        ):
            other.register("odd", LAYOUT, shards=shards[::-1], shard=1)

    def test_rows_of_another_ranks_width_are_refused(self, shared_endpoint: str) -> None:
        ranks = Ranks(LAYOUT, 2, tp=2, ep=1)
        with producers(shared_endpoint, ranks, "widths") as connected:

            def exchange() -> None:
                """A quick answer is raised by the first of these, a slow one by the second."""
                connected[1].send_rows(Part.FORWARD, range(2), ranks.sent(0, Part.FORWARD), "v1")
                connected[1].flush()

            with pytest.raises(SchemaMismatch, match="for shard 1"):
                exchange()

    @given(st.integers(1, 4000))
    def test_a_row_of_slots_has_room_for_whole_slots_only(self, row_bytes: int) -> None:
        shard: Shard = rank_shards(LAYOUT, 2, 2)[0]
        slots, rest = divmod(row_bytes - shard.head_bytes, shard.slot_bytes)
        fits = rest == 0 and 0 <= slots <= shard.slots
        assert shard.accepts(Part.FORWARD, row_bytes) == fits
