"""The status document tells the truth at every moment, also while the store works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bridge.daemon import Daemon
from bridge.errors import CorruptMessage
from bridge.index import Catalog
from bridge.layout import Part, RecordLayout
from bridge.observe.histogram import BOUNDS_S, Durations
from bridge.observe.status import Sample, from_json, rates, to_json
from bridge.producer.producer import RecordProducer
from bridge.store import Entry, MemoryStore
from bridge.wire import Hello, Trajectory, TrajectoryState


class SlowStore(MemoryStore):
    """Holds rows only once it is let go."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.works = threading.Event()
        self.let_go = threading.Event()

    def append(self, entries: Sequence[Entry]) -> list[int]:
        if any(entry.payload is not None for entry in entries):
            self.works.set()
            self.let_go.wait()
        return super().append(entries)


def test_rows_that_the_store_works_on_are_seen_waiting_and_then_received(
    layout: RecordLayout, make_rows: Callable[..., NDArray[np.uint8]]
) -> None:
    store, stop = SlowStore(), threading.Event()
    daemon = Daemon("tcp://127.0.0.1:0", store)
    thread = threading.Thread(target=daemon.run, args=(stop.is_set,))
    thread.start()
    try:
        # Never sent again: how many messages arrive does not depend on how busy the machine is.
        with RecordProducer(daemon.endpoint, resend_after_s=600, deadline_s=600) as engine:
            engine.register("e", layout)
            sent = time.monotonic()
            engine.send_rows(Part.FORWARD, range(5), make_rows(Part.FORWARD, range(5)), "v")
            store.works.wait()
            first = daemon.monitor.newest().waiting
            time.sleep(0.01)
            then = daemon.monitor.newest().waiting
            assert first.rows == then.rows == 5
            assert then.nbytes == 5 * layout.row_bytes(Part.FORWARD)
            assert then.oldest_s - first.oldest_s >= 0.01
            assert then.oldest_s < time.monotonic() - sent
            store.let_go.set()
            engine.flush()
        stop.set()
        thread.join()
        status = daemon.monitor.take()
        assert (status.waiting.rows, status.waiting.oldest_s) == (0, 0.0)
        assert status.rows_received[Part.FORWARD] == 5
        assert status.ack_latency.sum_s >= then.oldest_s
    finally:
        store.let_go.set()
        stop.set()
        thread.join()
        daemon.close()


def test_a_document_survives_the_way_to_json_and_back_and_others_are_refused() -> None:
    daemon = Daemon("tcp://127.0.0.1:0", MemoryStore(1 << 20))
    status = daemon.monitor.take()
    daemon.close()
    assert from_json(to_json(status)) == status
    for document in (b"", b"[]", b"{}", to_json(status).replace(b'"pid":', b'"pid":"x')):
        with pytest.raises(CorruptMessage, match="same sglang-trace version"):
            from_json(document)


def test_rates_are_those_of_the_last_seconds() -> None:
    daemon = Daemon("tcp://127.0.0.1:0", MemoryStore(1 << 20))
    status = daemon.monitor.take()
    daemon.close()
    start = Sample(0.0, 0, 0, 0, 0, 0, 0, 0.0)
    before, last = Sample(90.0, 1000, 0, 0, 0, 0, 1, 9.0), Sample(95.0, 1010, 50, 5, 20, 1, 3, 9.5)
    recent = rates(replace(status, history=(start, before, last)))
    assert recent.rows_in == 2
    assert (recent.bytes_in, recent.rows_out, recent.bytes_out) == (10, 1, 4)
    assert recent.dropped_rows == pytest.approx(0.2)
    assert recent.ack_s == 0.25
    alone = rates(replace(status, history=(start,)))
    assert (alone.rows_in, alone.ack_s) == (0, None)


@given(st.lists(st.floats(0, 20), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_smallest_bound_that_enough_durations_do_not_exceed(
    durations: list[float], share: float
) -> None:
    counted = Durations()
    for duration in durations:
        counted.add(duration)
    found = counted.histogram().quantile(share)
    assert found is not None
    due = share * len(durations)
    assert sum(duration <= found for duration in durations) >= due
    for bound in BOUNDS_S:
        if bound < found:
            assert sum(duration <= bound for duration in durations) < due


def test_without_durations_there_is_no_quantile() -> None:
    assert Durations().histogram().quantile(0.5) is None


_TOLD = st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(TrajectoryState))


@given(st.lists(st.one_of(_TOLD, st.sampled_from(["a", "b", "c"])), max_size=30))
def test_trajectories_are_counted_by_state_however_they_change_and_go(
    layout: RecordLayout, story: list[tuple[str, TrajectoryState] | str]
) -> None:
    catalog = Catalog()
    catalog.apply(Hello("e", layout), 0, 0)
    gone = []
    for number, said in enumerate(story, start=1):
        if isinstance(said, tuple):
            tokens, rows = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)
            catalog.apply(Trajectory("e", said[0], 0, tokens, rows, said[1]), number, number)
        elif said in catalog.trajectories:
            gone.append(catalog.trajectories[said].state)
            catalog.delete([said], np.empty(0, dtype=np.int64))
    held = [trajectory.state for trajectory in catalog.trajectories.values()]
    assert catalog.states == {state: held.count(state) for state in TrajectoryState}
    assert catalog.collected == {state: gone.count(state) for state in TrajectoryState}
