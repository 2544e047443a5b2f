"""Training steps whose records come from a running bridge, prepared ahead by a `RecordFeed`."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.trainer_step.model import VOCABULARY, Trainer
from benchmarks.trainer_step.records import random_records
from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.layout import Part, RecordLayout
from bridge.producer.producer import RecordProducer
from megatron_trace import MicroBatchRequest, RecordFeed, guide


def measure_live(trainer: Trainer, layout: RecordLayout, steps: int) -> dict[str, Any]:
    """Time `steps` steps, each on trajectories of its own, after one that does not count."""
    shape = trainer.tokens.shape
    batches = [torch.randint(VOCABULARY, shape) for _ in range(steps + 1)]
    bridge = spawn.start()
    with RecordProducer(bridge.endpoint) as producer, TraceClient(bridge.endpoint) as client:
        requests = _sent(producer, layout, batches)
        with RecordFeed(client, requests, model=trainer.model, device="cuda", depth=2) as feed:
            found = _timed(trainer, feed, batches)
    bridge.stop()
    sent = sum(layout.row_bytes(part) for part in Part) * trainer.tokens.numel()
    return found | {"record_mb_per_step": round(sent / 1e6, 1)}


def _sent(
    producer: RecordProducer, layout: RecordLayout, batches: list[torch.Tensor]
) -> list[MicroBatchRequest]:
    """Send random records of every batch, and return how to ask for them."""
    producer.register("engine", layout)
    requests, first = [], 0
    for number, tokens_bs in enumerate(batches):
        names = [f"step{number}-{row}" for row in range(len(tokens_bs))]
        for name, tokens in zip(names, tokens_bs, strict=True):
            record = random_records(name, tokens, layout)
            rows = torch.arange(first, first + len(tokens) - 1)
            producer.send_rows(Part.FORWARD, rows, record.forward[:-1], "1")
            producer.send_rows(Part.KV, rows, record.kv[:-1], "1")
            every_row = torch.cat((rows, torch.tensor([-1])))
            producer.send_trajectory(name, 0, tokens, every_row, "finished")
            first += len(rows)
        requests.append(MicroBatchRequest(names, tokens_bs, "1"))
    producer.flush()
    return requests


def _timed(trainer: Trainer, feed: RecordFeed, batches: list[torch.Tensor]) -> dict[str, Any]:
    ready = iter(feed)
    waited = elapsed = 0.0
    for number, tokens in enumerate(batches):
        trainer.tokens = tokens.cuda()
        torch.cuda.synchronize()
        begin, waited_before = time.monotonic(), feed.waited_s
        with guide(next(ready)):
            trainer.step()
        torch.cuda.synchronize()
        if number:
            elapsed += time.monotonic() - begin
            waited += feed.waited_s - waited_before
    steps = len(batches) - 1
    return {
        "ms": round(1000 * elapsed / steps, 2),
        "waited_ms": round(1000 * waited / steps, 3),
        "exposed_wait_share": round(waited / elapsed, 5),
    }
