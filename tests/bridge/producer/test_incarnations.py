"""An engine id belongs to the process that used it first, also after the bridge has restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.errors import EngineIdTaken, RowTaken
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from bridge.store import CachedStore, DiskStore, MemoryStore, Store

MakeRows = Callable[..., NDArray[np.uint8]]


@pytest.fixture(params=["memory", "spill", "disk", "disk without memory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    disk = DiskStore(tmp_path / "store", 64 << 20)
    match request.param:
        case "memory":
            store: Store = MemoryStore(64 << 20)
            disk.close()
        case "spill":
            store = MemoryStore(128 << 10, disk)
        case "disk":
            store = CachedStore(disk, 64 << 20)
        case _:
            store = disk
    with closing(store):
        yield store


def run(producer: RecordProducer, layout: RecordLayout, payload: NDArray[np.uint8]) -> None:
    """Do what every engine process does: count rows from 0."""
    producer.register("run", layout)
    producer.send_rows(Part.FORWARD, range(len(payload)), payload, "1")
    tokens = range(len(payload))
    producer.send_trajectory("first", 0, tokens, tokens, "finished", rollout=1)
    producer.flush()


def send(
    producer: RecordProducer, rows: Sequence[int], payload: NDArray[np.uint8], weights: str
) -> None:
    producer.send_rows(Part.FORWARD, rows, payload, "1", weights=weights)
    producer.flush()


def send_in_turn(producer: RecordProducer, payloads: Sequence[NDArray[np.uint8]]) -> None:
    """Send row 7 with each payload and wait for nothing in between."""
    for payload in payloads:
        producer.send_rows(Part.FORWARD, [7], payload, "1")
    producer.flush()


def test_a_process_with_an_engine_id_of_another_is_refused_and_changes_nothing(
    serve: Callable[[Store], str], tier: Store, layout: RecordLayout, make_rows: MakeRows
) -> None:
    endpoint = serve(tier)
    payload = make_rows(Part.FORWARD, range(40))
    with RecordProducer(endpoint) as producer:
        run(producer, layout, payload)
        with closing(RecordProducer(endpoint)) as twin:
            with pytest.raises(EngineIdTaken, match="use a new engine id"):
                run(twin, layout, ~payload)
            for call in (twin.flush, twin.poll, lambda: twin.send_digests("1", {})):
                with pytest.raises(EngineIdTaken):
                    call()
            assert twin.unacknowledged_bytes == 0
        producer.send_rows(Part.KV, [0], make_rows(Part.KV, [0]), "1")
    with TraceClient(endpoint) as client:
        np.testing.assert_array_equal(client.fetch("first").forward, payload)


def test_the_id_stays_taken_when_the_bridge_restarts_and_the_first_process_goes_on(
    tmp_path: Path, layout: RecordLayout, make_rows: MakeRows
) -> None:
    payload = make_rows(Part.FORWARD, range(4))
    first = spawn.start(tmp_path)
    with RecordProducer(first.endpoint, resend_after_s=0.2) as producer:
        try:
            run(producer, layout, payload)
        finally:
            first.process.kill()
            first.stop()
        again = spawn.start(tmp_path, endpoint=first.endpoint)
        try:
            with closing(RecordProducer(again.endpoint)) as twin, pytest.raises(EngineIdTaken):
                twin.register("run", layout)
            producer.send_rows(Part.FORWARD, range(4, 8), payload, "1")
            producer.flush()
        finally:
            again.stop()


def test_with_several_bridges_a_twin_is_refused_before_any_takes_its_rows(
    serve: Callable[[Store], str], layout: RecordLayout, make_rows: MakeRows
) -> None:
    endpoints = [serve(MemoryStore(64 << 20)) for _ in range(2)]
    payload = make_rows(Part.FORWARD, range(4))
    with RecordProducer(",".join(endpoints)) as producers:
        run(producers, layout, payload)
        with (
            closing(RecordProducer(",".join(endpoints))) as twin,
            pytest.raises(EngineIdTaken),
        ):
            run(twin, layout, ~payload)


@pytest.mark.parametrize("first", [0, 2], ids=["all rows", "some rows"])
def test_other_bytes_for_a_held_row_are_refused_and_equal_bytes_are_a_duplicate(
    serve: Callable[[Store], str],
    tier: Store,
    layout: RecordLayout,
    make_rows: MakeRows,
    first: int,
) -> None:
    endpoint = serve(tier)
    payload = make_rows(Part.FORWARD, range(8))
    rows, tokens = range(first, first + 4), range(8)
    with closing(RecordProducer(endpoint)) as producer, TraceClient(endpoint) as client:
        producer.register("e", layout)
        producer.send_rows(Part.FORWARD, range(4), payload[:4], "1", weights="a1")
        producer.send_trajectory("t", 0, tokens, tokens, "finished")
        producer.flush()
        producer.send_rows(Part.FORWARD, rows, payload[rows], "1", weights="a1")
        producer.flush()
        assert client.stats().duplicates == (1 if first == 0 else 0)
        altered = payload[rows].copy()
        altered[1] ^= 1
        for sent, weights in ((altered, "a1"), (payload[rows], "b2")):
            with pytest.raises(RowTaken, match=r"row \d"):
                send(producer, rows, sent, weights)
        held = client.fetch("t").forward[: rows.stop]
        np.testing.assert_array_equal(held, payload[: rows.stop])


def test_rows_of_one_turn_are_compared_with_each_other(
    serve: Callable[[Store], str], layout: RecordLayout, make_rows: MakeRows
) -> None:
    payload = make_rows(Part.FORWARD, range(1))
    with closing(RecordProducer(serve(MemoryStore(64 << 20)))) as producer:
        producer.register("e", layout)
        with pytest.raises(RowTaken):
            send_in_turn(producer, [payload ^ np.uint8(number) for number in range(40)])
        assert producer.acknowledged_rows == 1


def test_a_row_number_that_stands_twice_in_a_message_is_refused(
    serve: Callable[[Store], str], layout: RecordLayout, make_rows: MakeRows
) -> None:
    with closing(RecordProducer(serve(MemoryStore(64 << 20)))) as producer:
        producer.register("e", layout)
        with pytest.raises(RowTaken, match="row 5 twice"):
            send(producer, [9, 5, 5], make_rows(Part.FORWARD, range(3)), "")
