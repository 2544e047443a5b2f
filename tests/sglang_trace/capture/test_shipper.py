"""The shipper's thread against a real bridge daemon, and against one that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.errors import BridgeUnreachable, NonFiniteActivation
from bridge.fp4.nvfp4 import quantize_nvfp4, token_scale
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.producer.producer import Overflow, RecordProducer
from bridge.wire import TrajectoryState
from sglang_trace.capture.events import DigestsEvent, RowsEvent, TrajectoryEvent
from sglang_trace.capture.shipper import Shipper, ShipperFailed
from sglang_trace.weights.versions import Weights

LAYOUT = RecordLayout(
    ModelShape(1, 32, 16, 4, 1, 1, 16, (0,), (0,)), (0,), (Site.FC1, Site.ROUTES), bits=4
)


@pytest.fixture
def bridge() -> Iterator[str]:
    own = spawn.start()
    yield own.endpoint
    own.stop()


def shipper_to(endpoint: str, overflow: Overflow = Overflow.BLOCK, **options: float) -> Shipper:
    return Shipper(
        lambda: RecordProducer(endpoint, overflow=overflow, **options),
        lambda producer: producer.register("engine", LAYOUT),
        LAYOUT,
        overflow,
    )


def rows_event(x_TH: torch.Tensor, first: int = 0) -> RowsEvent:
    rows = torch.zeros(len(x_TH), LAYOUT.row_bytes(Part.FORWARD), dtype=torch.uint8)
    values = quantize_nvfp4(x_TH, token_scale(x_TH))
    LAYOUT.write_site(rows, Site.FC1, 0, values.codes_u8, values.scales_u8, values.global_scale)
    numbers = torch.arange(first, first + len(x_TH))
    return RowsEvent(Part.FORWARD, numbers, Weights("v0"), lambda: rows, rows.nbytes)


def trajectory_event(count: int) -> TrajectoryEvent:
    tokens = torch.arange(count, dtype=torch.int32)
    return TrajectoryEvent("t", tokens, torch.arange(count), TrajectoryState.FINISHED, 12 * count)


def test_closing_delivers_everything_in_order(bridge: str) -> None:
    shipper = shipper_to(bridge)
    shipper.put(DigestsEvent("v0", {"model.w": "ab"}, 9))
    for first in (0, 3, 6):
        shipper.put(rows_event(torch.randn(3, 32), first))
    shipper.put(trajectory_event(9))
    shipper.close()
    with TraceClient(bridge) as client:
        records = client.fetch("t")
        assert records.forward_valid.all()
        assert records.weight_versions == ("v0",)
        assert client.digests("v0") == {"model.w": "ab"}


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_nan_activation_ends_the_next_call_with_its_place(bridge: str, poison: float) -> None:
    shipper = shipper_to(bridge)
    x = torch.randn(2, 32)
    x[1, 5] = poison
    shipper.put(rows_event(x))
    shipper.close()
    with pytest.raises(NonFiniteActivation, match="fc1 of layer 0"):
        shipper.check()


def test_a_missing_bridge_is_met_when_the_shipper_starts() -> None:
    with pytest.raises(BridgeUnreachable, match="python -m bridge serve"):
        shipper_to("tcp://127.0.0.1:9", deadline_s=0.3)


def test_a_bridge_that_goes_away_ends_the_next_call_and_keeps_what_it_acknowledged(
    tmp_path,
) -> None:
    own = spawn.start(tmp_path)
    shipper = shipper_to(own.endpoint, deadline_s=0.5, resend_after_s=0.2)
    shipper.put(rows_event(torch.randn(2, 32)))
    shipper.put(trajectory_event(2))
    with TraceClient(own.endpoint) as client:
        while not any(item.trajectory == "t" for item in client.list_trajectories()):
            pass
    own.stop()
    shipper.put(rows_event(torch.randn(2, 32), 2))
    shipper.close()
    with pytest.raises(BridgeUnreachable):
        shipper.put(rows_event(torch.randn(2, 32), 4))
    restarted = spawn.start(tmp_path)
    with TraceClient(restarted.endpoint) as client:
        assert client.fetch("t").forward_valid.all()
    restarted.stop()


def test_an_unforeseen_error_on_the_thread_is_not_lost(bridge: str) -> None:
    shipper = shipper_to(bridge)

    def broken() -> torch.Tensor:
        raise ZeroDivisionError("division by zero")

    shipper.put(RowsEvent(Part.FORWARD, torch.arange(1), Weights("v0"), broken, 1))
    shipper.close()
    with pytest.raises(ShipperFailed, match="ZeroDivisionError"):
        shipper.check()


def test_a_full_queue_makes_the_scheduler_wait(
    bridge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_trace.capture.shipper.QUEUE_BYTES", 10)
    gate = threading.Event()
    shipper = shipper_to(bridge)

    def held_back() -> torch.Tensor:
        gate.wait(10)
        return torch.zeros(1, LAYOUT.row_bytes(Part.FORWARD), dtype=torch.uint8)

    for number in range(2):
        shipper.put(RowsEvent(Part.FORWARD, torch.tensor([number]), Weights("v0"), held_back, 8))
    third = threading.Thread(target=shipper.put, args=(trajectory_event(2),))
    third.start()
    third.join(0.3)
    assert third.is_alive(), "8 + 24 bytes do not fit into 10"
    gate.set()
    third.join(10)
    assert not third.is_alive()
    shipper.close()


def test_a_full_queue_gives_rows_up_when_asked_to_and_the_bridge_knows_how_many(
    bridge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_trace.capture.shipper.QUEUE_BYTES", 10)
    gate = threading.Event()
    shipper = shipper_to(bridge, Overflow.DROP)

    def held_back() -> torch.Tensor:
        gate.wait(10)
        return torch.zeros(1, LAYOUT.row_bytes(Part.FORWARD), dtype=torch.uint8)

    for number in range(10):
        shipper.put(RowsEvent(Part.FORWARD, torch.tensor([number]), Weights("v0"), held_back, 8))
    gate.set()
    shipper.close()
    with TraceClient(bridge) as client:
        stats = client.stats()
        assert stats.dropped_rows >= 8
        assert stats.forward_rows + stats.dropped_rows == 10
