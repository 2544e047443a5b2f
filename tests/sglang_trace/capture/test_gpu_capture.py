"""Capture on a GPU: decode graphs with padding, nothing that waits, the CPU reference's records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
import torch
from torch import Tensor, nn

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.fp4.digest import digest
from bridge.fp4.nvfp4 import quantize_weight
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.producer.producer import RecordProducer
from sglang_trace.capture.capture import Capture, changed_digests
from sglang_trace.capture.ledger import Ledger
from sglang_trace.capture.shipper import Shipper
from sglang_trace.capture.staging import Staging
from sglang_trace.quantization import reference
from sglang_trace.quantization.moe_method import TraceNvfp4MoEMethod
from tests.sglang_trace.capture.test_capture import decode, request
from tests.sglang_trace.kernels.inputs import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

SLOTS = 8
SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}
FORWARD = (Site.FC1, Site.FC2, Site.ROUTES)


def grid(*shape: int, seed: int) -> Tensor:
    """BF16 numbers that NVFP4 holds exactly, and whose products any FP32 sum adds exactly."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, shape, generator=generator) * 0.5
    x[..., ::16] = 3.0
    return x.bfloat16()


def layout_of(layers: int, experts: int, hidden: int, width: int) -> RecordLayout:
    every = tuple(range(layers))
    shape = ModelShape(layers, hidden, width, experts, SLOTS, 1, 16, every, every)
    return RecordLayout(shape, every, FORWARD, bits=4)


class Layer(nn.Module):
    """What SGLang's FusedMoE is to our method."""

    def __init__(self, number: int, layout: RecordLayout) -> None:
        super().__init__()
        shape = layout.shape
        self.layer_id = number
        self.quant_method: Any = TraceNvfp4MoEMethod()
        with torch.device("cuda"):
            self.quant_method.create_weights(
                self,
                shape.num_experts,
                shape.hidden_size,
                shape.moe_intermediate_size,
                torch.bfloat16,
            )
        self.load(seed=number)

    def load(self, seed: int) -> dict[tuple[int, str], Tensor]:
        """Load new weights as SGLang does; returns them."""
        experts = self.quant_method.experts
        hidden, width = 2 * self.w13_weight.shape[2], self.w13_weight.shape[1] // 2
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        loaded = {}
        for expert in range(experts.count):
            for at, (name, shape) in enumerate(shapes.items()):
                matrix = grid(*shape, seed=seed * 10_000 + expert * 3 + at)
                param: Any = self.w2_weight if name == "down" else self.w13_weight
                param.weight_loader(param, matrix, name, shard_id=SHARDS[name], expert_id=expert)
                loaded[expert, name] = matrix
        self.quant_method.process_weights_after_loading(self)
        return loaded

    def forward(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        dispatched = SimpleNamespace(hidden_states=x_TH, topk_output=(weights_TK, ids_TK, None))
        y_TH: Tensor = self.quant_method.apply(self, dispatched).hidden_states
        return y_TH


def routes(tokens: int, experts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Router weights and expert ids of distinct experts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(SLOTS).indices.int()
    weights = torch.softmax(torch.randn(tokens, SLOTS, generator=generator), -1)
    return weights, ids


def reference_rows(
    layer: Layer, layout: RecordLayout, x: Tensor, weights: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The layer's output and staging rows as the torch reference computes them on the CPU."""
    experts = layer.quant_method.experts
    hats = {
        name: torch.stack(
            [experts.matrix(e, name).dequantize(torch.float32).cpu() for e in range(experts.count)]
        )
        for name in SHARDS
    }
    staging = Staging(layout, len(x), "cpu")
    w13 = torch.cat((hats["gate"], hats["up"]), dim=1)
    recorder = staging.recorder(layer.layer_id)
    y = reference.run_experts(x, weights, ids, w13, hats["down"], recorder)
    return y, staging.rows_MB


EXPLICIT_WAITS = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
)


class Waited(AssertionError):
    """The thread that decodes has waited for the GPU."""


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Refuse what waits for the GPU: torch's own calls on any thread, explicit ones on this one."""
    torch.cuda.synchronize()
    decoding = threading.get_ident()

    def refusing(wait: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == decoding:
                raise Waited(wait)
            return wait(*arguments, **named)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for place, name in EXPLICIT_WAITS:
            patch.setattr(place, name, refusing(getattr(place, name)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "wait",
    [
        lambda x, _event: x.sum().item(),
        lambda x, _event: x.cpu(),
        lambda x, _event: x.nonzero(),
        lambda x, _event: x.copy_(torch.ones(8)),
        lambda _x, event: event.synchronize(),
        lambda _x, _event: torch.cuda.current_stream().synchronize(),
        lambda _x, _event: torch.cuda.synchronize(),
    ],
)
def test_a_wait_would_be_found(wait: Callable[[Tensor, torch.cuda.Event], Any]) -> None:
    x, event = torch.ones(8, device="cuda"), torch.cuda.Event()
    event.record()
    with nothing_waits(), pytest.raises((RuntimeError, Waited)):
        wait(x, event)


def test_records_are_the_cpu_references_over_ten_million_sites() -> None:
    layout = layout_of(1, 128, 2048, 768)
    layer = Layer(0, layout)
    tokens = 1400
    x, (weights, ids) = grid(tokens, 2048, seed=7), routes(tokens, 128, seed=8)
    assert tokens * (2048 + SLOTS * 768) > 10**7
    staging = Staging(layout, tokens, "cuda")
    layer.quant_method.recorder = staging.recorder(0)
    y = layer(x.cuda(), weights.cuda(), ids.cuda()).cpu()
    expected_y, expected = reference_rows(layer, layout, x, weights, ids)
    recorded = staging.rows_MB.cpu()
    differing = sum(int(((recorded ^ expected) >> bit & 1).sum()) for bit in range(8))
    print(f"{tokens * (2048 + SLOTS * 768):,} sites: {differing} bits differ", flush=True)
    assert differing == 0
    torch.testing.assert_close(y, expected_y, rtol=2**-6, atol=float(expected_y.abs().max()) / 256)


def test_a_loaded_layer_is_the_shared_quantizers_and_graphs_see_an_update() -> None:
    layout = layout_of(1, 16, 256, 128)
    model = nn.Module()
    model.experts = Layer(0, layout)
    x, (weights, ids) = grid(4, 256, seed=1).cuda(), routes(4, 16, seed=2)
    inputs = (x, weights.cuda(), ids.cuda())
    y, graph = captured(lambda: model.experts(*inputs))
    changed_digests(model)
    loaded = model.experts.load(seed=5)
    told = changed_digests(model)
    assert told == {
        f"experts.{expert}.{name}_proj.weight": digest(quantize_weight(matrix))
        for (expert, name), matrix in loaded.items()
    }
    graph.replay()
    assert torch.equal(y, model.experts(*inputs))


def captured(run: Any) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Record a call in a CUDA graph; returns its static result and the graph."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph


def test_decode_graphs_record_each_row_once_without_a_wait_and_no_padding() -> None:
    """Three requests in a graph of four rows, twelve steps, a prompt from the prefix cache."""
    steps, rids = 12, ["a", "b", "c"]
    layout = layout_of(2, 16, 256, 128)
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(0, layout), Layer(1, layout)])
    inputs = [[grid(4, 256, seed=10 * step + at) for at in range(2)] for step in range(steps)]
    routed = [[routes(4, 16, seed=10 * step + at) for at in range(2)] for step in range(steps)]
    on_gpu = [
        [(x.cuda(), *(part.cuda() for part in routed[step][at])) for at, x in enumerate(pair)]
        for step, pair in enumerate(inputs)
    ]
    slots = [torch.tensor([10 * row + step + 1 for row in range(3)]) for step in range(steps)]
    slots_on_gpu = [each.cuda() for each in slots]
    bridge = spawn.start()
    shipper = Shipper(
        lambda: RecordProducer(bridge.endpoint),
        lambda producer: producer.register("engine", layout),
        layout,
    )
    capture = Capture(model, layout, None, Ledger(64, "cuda"), Staging(layout, 8, "cuda"), shipper)
    capture.weights_changed("v0")
    static = [[part.clone() for part in on_gpu[0][at]] for at in range(2)]
    _, graph = captured(lambda: [layer(*static[at]) for at, layer in enumerate(model.layers)])
    table = torch.stack([torch.stack([s[row] for s in slots]) for row in range(3)]).cuda()
    ended = [request(rid, [1], list(range(steps))) for rid in rids]
    with nothing_waits():
        for step in range(steps):
            for at in range(2):
                for target, source in zip(static[at], on_gpu[step][at], strict=True):
                    target.copy_(source)
            graph.replay()
            batch = decode([], ended, [step + 1] * 3)
            batch.out_cache_loc = slots_on_gpu[step]
            capture.forward(batch)
        for row, each in enumerate(ended):
            capture.finish(each, table[row].int())
        # The slots of "a" are found again by a request that computed nothing of its own.
        capture.finish(request("d", [1], list(range(steps))), table[0])
    capture.close()
    shipper.check()
    with TraceClient(bridge.endpoint) as client:
        assert client.stats().forward_rows == 3 * steps
        for row, rid in enumerate([*rids, "d"]):
            records = client.fetch(rid)
            assert records.forward_valid.tolist() == [True] * steps + [False]
            for step in range(steps):
                at_row = row % 3
                expected = torch.zeros(1, layout.row_bytes(Part.FORWARD), dtype=torch.uint8)
                for at, layer in enumerate(model.layers):
                    one = slice(at_row, at_row + 1)
                    weights, ids = (part[one] for part in routed[step][at])
                    _, rows = reference_rows(layer, layout, inputs[step][at][one], weights, ids)
                    expected |= rows
                assert torch.equal(records.forward[step : step + 1], expected)
    bridge.stop()


def test_decode_takes_no_memory_that_it_does_not_give_back() -> None:
    """Neither more layers nor more steps need more; a replay does not even ask for any."""
    layout = layout_of(2, 16, 256, 128)
    layers = [Layer(0, layout), Layer(1, layout)]
    staging = Staging(layout, 8, "cuda")
    for layer in layers:
        layer.quant_method.recorder = staging.recorder(layer.layer_id)
    x, (weights, ids) = grid(4, 256, seed=1).cuda(), routes(4, 16, seed=2)
    inputs = (x, weights.cuda(), ids.cuda())

    def step() -> None:
        for layer in layers:
            layer(*inputs)

    _, graph = captured(step)
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(50):
        step()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (held, reserved)
    asked = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == asked
