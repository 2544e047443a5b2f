"""K and V records gathered by a kernel are those that a CPU reads out of the same pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bridge.client.client import TraceClient
from bridge.client.records import TrajectoryRecords
from bridge.daemon import spawn
from bridge.errors import NonFiniteActivation
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.producer.producer import Overflow, RecordProducer
from bridge.transport.bridge_sharding import shard_of
from sglang_trace.capture.capture import Capture, kv_source
from sglang_trace.capture.kv_cpu import KVReader
from sglang_trace.capture.kv_gpu import KVGather
from sglang_trace.capture.ledger import Ledger
from sglang_trace.capture.shipper import Shipper
from sglang_trace.capture.staging import Staging
from tests.sglang_trace.attention.engine import make_pool
from tests.sglang_trace.capture.test_capture import decode, extend, request
from tests.sglang_trace.capture.test_gpu_capture import nothing_waits
from tests.sglang_trace.kernels.inputs import DEVICE, needs_gpu

SHAPE = ModelShape(3, 64, 64, 8, 2, 2, 64, (0, 1, 2), (0, 1, 2))
LAYOUT = RecordLayout(SHAPE, (1, 2), (Site.K, Site.V), bits=2)
SLOTS = 40


@pytest.fixture
def bridge() -> Iterator[str]:
    own = spawn.start()
    yield own.endpoint
    own.stop()


@pytest.fixture
def pool() -> Any:
    """A pool in which every layer and slot holds something else."""
    made = make_pool(SLOTS, SHAPE.num_kv_heads, SHAPE.head_dim, 3)
    generator = torch.Generator().manual_seed(1)
    for layer in range(3):
        for buffer in made.get_raw_kv_buffer(layer):
            random = torch.randint(0, 0x7F, buffer.shape, generator=generator, dtype=torch.uint8)
            buffer.view(torch.uint8).copy_(random)
    return made


def shipper_to(endpoint: str, overflow: Overflow = Overflow.BLOCK) -> Shipper:
    return Shipper(
        lambda: RecordProducer(endpoint, overflow=overflow),
        lambda producer: producer.register("engine", LAYOUT),
        LAYOUT,
        overflow,
    )


def capture_with(source: KVReader | KVGather, shipper: Shipper, bridges: int = 1) -> Capture:
    staging, ledger = Staging(LAYOUT, 16, DEVICE), Ledger(SLOTS + 1, DEVICE)
    begun = Capture(nn.Module(), LAYOUT, source, ledger, staging, shipper, bridges)
    begun.weights_changed("v0")
    return begun


def on_device(batch: Any) -> Any:
    batch.out_cache_loc = batch.out_cache_loc.to(DEVICE)
    return batch


def run_to_the_end(capture: Capture, shipper: Shipper, first: str = "a", second: str = "b") -> None:
    """Two requests that share a prefix; weights change while the second one runs."""
    shared = [7, 3, 9, 12]
    one, other = request(first, [1, 2, 3, 4], [5]), request(second, [1, 2, 3, 4, 6, 7], [8, 9])
    capture.forward(on_device(extend(shared, (one, 0, 4))))
    capture.forward(on_device(extend([5, 6], (other, 4, 2))))
    capture.finish(one, table(shared))
    capture.weights_changed("v1")
    capture.forward(on_device(decode([20], [other], [7])))
    capture.finish(other, table([*shared, 5, 6, 20]))
    capture.close()
    shipper.check()


def table(slots: list[int]) -> Tensor:
    return torch.tensor([*slots, 0, 0], dtype=torch.int32, device=DEVICE)


def recorded(endpoint: str, source: KVReader | KVGather) -> dict[str, TrajectoryRecords]:
    shipper = shipper_to(endpoint)
    run_to_the_end(capture_with(source, shipper), shipper)
    with TraceClient(endpoint) as client:
        assert client.stats().kv_rows == 7, "a shared prefix is sent once"
        return {name: client.fetch(name) for name in ("a", "b")}


@pytest.mark.parametrize("rows_a_piece", [1, 3, 1000])
def test_gathered_records_are_those_that_a_cpu_reads(
    bridge: str, pool: Any, rows_a_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = rows_a_piece * LAYOUT.row_bytes(Part.KV)
    monkeypatch.setattr("sglang_trace.capture.kv_gpu.PIECE_BYTES", piece)
    found = recorded(bridge, KVGather(LAYOUT, pool))
    reader = KVReader(LAYOUT, pool)
    for name, slots in (("a", [7, 3, 9, 12]), ("b", [7, 3, 9, 12, 5, 6, 20])):
        records = found[name]
        assert records.kv_valid.tolist() == [True] * len(slots) + [False]
        pieces = reader.gather(torch.tensor(slots, device=DEVICE))
        expected = reader.encode([on_cpu(each) for each in pieces])
        assert torch.equal(records.kv[:-1], expected)
    assert [found["b"].weight_versions[at] for at in found["b"].weight_version_index[:-1]] == [
        *["v0"] * 6,
        "v1",
    ]


def test_gathered_rows_go_to_the_bridges_that_their_numbers_name(bridge: str, pool: Any) -> None:
    """The first bridge owns "d" and the prefix, the second one "a"."""
    assert [shard_of(name, 2) for name in ("d", "a")] == [0, 1]
    second = spawn.start()
    both = f"{bridge},{second.endpoint}"
    shipper = shipper_to(both)
    run_to_the_end(capture_with(KVGather(LAYOUT, pool), shipper, bridges=2), shipper, "d", "a")
    reader = KVReader(LAYOUT, pool)
    with TraceClient(both) as client:
        for name, slots in (("d", [7, 3, 9, 12]), ("a", [7, 3, 9, 12, 5, 6, 20])):
            records = client.fetch(name)
            pieces = reader.gather(torch.tensor(slots, device=DEVICE))
            expected = reader.encode([on_cpu(each) for each in pieces])
            assert torch.equal(records.kv[:-1], expected)
        versions = [records.weight_versions[at] for at in records.weight_version_index[:-1]]
        assert versions == [*["v0"] * 6, "v1"]
    held = []
    for endpoint in (bridge, second.endpoint):
        with TraceClient(endpoint) as client:
            held.append(client.stats().kv_rows)
    assert held == [4, 3]
    second.stop()


def on_cpu(piece: Any) -> Any:
    return type(piece)(piece.site, piece.layer, piece.packed.cpu(), piece.scales.cpu())


def test_a_value_that_is_nan_ends_the_next_call_with_its_place(bridge: str, pool: Any) -> None:
    pool.get_raw_kv_buffer(2)[3].view(torch.uint8)[12, 1, 2] = 0x7F
    shipper = shipper_to(bridge)
    capture = capture_with(KVGather(LAYOUT, pool), shipper)
    # The thread may have met it before the last request ends.
    with pytest.raises(NonFiniteActivation, match="v of layer 2"):
        run_to_the_end(capture, shipper)


def test_rows_given_up_are_counted_without_having_been_copied(
    bridge: str, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_trace.capture.shipper.QUEUE_BYTES", 400)
    shipper = shipper_to(bridge, Overflow.DROP)
    gate, taken = threading.Event(), threading.Event()
    send, put = shipper._send, shipper.put

    def held_back(*arguments: Any) -> None:
        taken.set()
        gate.wait(60)
        send(*arguments)

    def put_when_the_first_is_taken(event: Any) -> None:
        put(event)
        assert taken.wait(60)

    monkeypatch.setattr(shipper, "_send", held_back)
    monkeypatch.setattr(shipper, "put", put_when_the_first_is_taken)
    capture = capture_with(KVGather(LAYOUT, pool), shipper)
    a, b = request("a", [1, 2, 3, 4], [5]), request("b", [1, 2, 3], [5])
    capture.forward(on_device(extend([7, 3, 9, 12], (a, 0, 4))))
    # The digests of a model without experts are nothing, so the queue is empty until here.
    capture.finish(a, table([7, 3, 9, 12]))
    capture.forward(on_device(extend([20, 21, 22], (b, 0, 3))))
    capture.finish(b, table([20, 21, 22]))
    gate.set()
    capture.close()
    shipper.check()
    with TraceClient(bridge) as client:
        stats = client.stats()
        assert stats.dropped_rows == 3
        assert stats.kv_rows == 4


def test_without_keys_and_values_nothing_reads_the_pool() -> None:
    routes = RecordLayout(SHAPE, (1, 2), (Site.ROUTES,), bits=1)
    assert kv_source(routes, None, "cuda") is None


@pytest.mark.gpu
@needs_gpu
def test_a_finish_on_a_gpu_waits_for_nothing(bridge: str, pool: Any) -> None:
    shipper = shipper_to(bridge)
    capture = capture_with(kv_source(LAYOUT, pool, "cuda"), shipper)
    first, second = (request(name, [1, 2], [3]) for name in ("warm-up", "c"))
    passes = [on_device(extend([30, 31], (each, 0, 2))) for each in (first, second)]
    slots = table([30, 31])
    # Kernels are compiled by the first request.
    capture.forward(passes[0])
    capture.finish(first, slots)
    with nothing_waits():
        capture.forward(passes[1])
        capture.finish(second, slots)
    capture.close()
    shipper.check()
    with TraceClient(bridge) as client:
        assert client.fetch("c").kv_valid.tolist() == [True, True, False]
