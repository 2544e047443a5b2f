"""Micro-batches are prepared in order, a bounded number ahead, and errors reach the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference_rollout import Weights
from torch import Tensor

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.errors import UnknownTrajectory
from bridge.layout import Part
from bridge.producer.producer import RecordProducer

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(5, 9, 7, 6)


@pytest.fixture(scope="module")
def records(lib: Any, weights: Weights, sequences: list[Tensor]) -> Any:
    return lib.roll_out(weights, sequences)[0]


@pytest.fixture
def client(lib: Any, sequences: list[Tensor], records: Any) -> Iterator[TraceClient]:
    bridge = spawn.start()
    with RecordProducer(bridge.endpoint) as producer, TraceClient(bridge.endpoint) as asking:
        producer.register("engine", lib.FULL_LAYOUT)
        first = 0
        for tokens, record in zip(sequences, records, strict=True):
            rows = torch.arange(first, first + len(tokens) - 1)
            producer.send_rows(Part.FORWARD, rows, record.forward[:-1], "1")
            producer.send_rows(Part.KV, rows, record.kv[:-1], "1")
            reported = torch.cat((rows, torch.tensor([-1])))
            producer.send_trajectory(record.trajectory, 0, tokens, reported, "finished")
            first += len(rows)
        producer.flush()
        yield asking
    bridge.stop()


def request(sequences: list[Tensor], index: int) -> Any:
    from megatron_trace import MicroBatchRequest

    return MicroBatchRequest(
        [f"t{index}"], sequences[index][None], "1", cu_seqlens=[0, len(sequences[index])]
    )


def test_micro_batches_come_in_order_and_guide_as_those_made_at_once(
    lib: Any, client: TraceClient, sequences: list[Tensor], records: Any, build_fp4: Any
) -> None:
    from megatron_trace import RecordFeed

    model = build_fp4()
    requests = [request(sequences, index) for index in (2, 0, 3, 1)]
    with RecordFeed(client, requests, model=model) as feed:
        for index, batch in zip((2, 0, 3, 1), feed, strict=True):
            own = lib.packed([records[index]], [sequences[index]])
            assert torch.equal(batch.rows.forward_rows, own.rows.forward_rows)
            assert torch.equal(batch.rows.kv_rows, own.rows.kv_rows)
            logits = lib.packed_logits(model, [sequences[index]], batch)
            assert torch.equal(logits, lib.packed_logits(model, [sequences[index]], own))
        assert list(feed) == [], "it has ended, and a second pass does not wait"
        assert feed.waited_s > 0


def test_no_more_than_the_depth_is_prepared_ahead(
    client: TraceClient, sequences: list[Tensor]
) -> None:
    from megatron_trace import RecordFeed

    asked = []

    def requests() -> Iterator[Any]:
        for index in range(4):
            asked.append(index)
            yield request(sequences, index)

    with RecordFeed(client, requests(), depth=1) as feed:
        time.sleep(1.0)
        assert asked == [0, 1], "one is ready, one waits for room"
        assert len(list(feed)) == 4


def test_an_error_is_raised_for_the_micro_batch_it_belongs_to(
    client: TraceClient, sequences: list[Tensor]
) -> None:
    from megatron_trace import MicroBatchRequest, RecordFeed

    unknown = MicroBatchRequest(["nobody"], sequences[1][None], "1", cu_seqlens=[0, 9])
    with RecordFeed(client, [request(sequences, 0), unknown, request(sequences, 2)]) as feed:
        batches = iter(feed)
        next(batches)
        with pytest.raises(UnknownTrajectory, match="nobody"):
            next(batches)


def test_leaving_early_stops_the_thread(client: TraceClient, sequences: list[Tensor]) -> None:
    from megatron_trace import RecordFeed

    with RecordFeed(client, (request(sequences, i % 4) for i in range(100))) as feed:
        next(iter(feed))
    assert list(feed) == []
    assert not any(thread.name == "trace-feed" for thread in threading.enumerate())
