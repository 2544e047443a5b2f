"""The attention backend on SGLang's own pools against dequantize-then-attend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bridge.fp4.nvfp4 import pack_nibbles, quantize_nvfp4
from sglang_trace.attention import extend_pieces
from sglang_trace.attention.backend import TraceFp4Backend
from sglang_trace.attention.reference import attend
from sglang_trace.attention.unsupported import AttentionRefused
from tests.sglang_trace.attention.engine import K_SCALE, V_SCALE, Engine
from tests.sglang_trace.attention.pools import flash_error, worst_error
from tests.sglang_trace.kernels.inputs import DEVICE, needs_gpu


@pytest.fixture
def engine() -> Engine:
    return Engine()


def expected(engine: Engine, layer: int, batch: Any, q: Tensor, new: list[int]) -> Tensor:
    attention = engine.model.layers[layer]
    q_THD = q.view(len(q), attention.tp_q_head_num, attention.head_dim)
    return attend(q_THD, engine.stored(layer, batch), new, attention.scaling).flatten(1)


def run(engine: Engine, backend: TraceFp4Backend, batch: Any, new: list[int], seed: int) -> None:
    """One pass through all layers; each output is compared with the reference."""
    backend.init_forward_metadata(batch)
    for number, layer in enumerate(engine.model.layers):
        q, k, v = engine.qkv(sum(new), seed + number)
        out = backend.forward(q, k, v, layer, batch)
        assert out.shape == q.shape
        if batch.forward_mode.is_decode():
            assert worst_error(out, expected(engine, number, batch, q, new)) < 1
        else:
            q_THD = q.view(len(q), layer.tp_q_head_num, layer.head_dim)
            kv = engine.stored(number, batch)
            assert flash_error(out.view_as(q_THD), q_THD, kv, new, layer.scaling) < 1


def test_chunks_a_prefix_hit_and_decode_read_what_is_stored(engine: Engine) -> None:
    backend = TraceFp4Backend(engine)
    run(engine, backend, engine.batch("EXTEND", [2, 3], [18, 7], [18, 7]), [18, 7], 1)
    # A later chunk; and a request whose prefix another one computed.
    table = engine.req_to_token_pool.req_to_token
    table[1, :7] = table[3, :7]
    run(engine, backend, engine.batch("EXTEND", [2, 1], [31, 12], [13, 5]), [13, 5], 3)
    for step in range(2):
        lengths = [32 + step, 8 + step, 13 + step]
        batch = engine.batch("DECODE", [2, 3, 1], lengths, [1, 1, 1])
        run(engine, backend, batch, [1, 1, 1], 10 + step)
    # A chunk together with a step of running requests.
    run(engine, backend, engine.batch("MIXED", [4, 2], [10, 34], [10, 1]), [10, 1], 20)


def test_a_pass_larger_than_the_scratch_is_computed_in_pieces(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 40 keys of one head of 64.
    monkeypatch.setattr(extend_pieces, "SCRATCH_BYTES", 40 * 64 * 4)
    backend = TraceFp4Backend(engine)
    new = [12, 7, 30, 3]
    run(engine, backend, engine.batch("EXTEND", [2, 3, 1, 4], new, new), new, 1)
    run(engine, backend, engine.batch("EXTEND", [2, 1], [15, 33], [3, 3]), [3, 3], 2)


def test_the_pool_holds_the_reference_quantizers_bits(engine: Engine) -> None:
    backend = TraceFp4Backend(engine)
    batch = engine.batch("EXTEND", [1], [9], [9])
    backend.init_forward_metadata(batch)
    q, k, v = engine.qkv(9, 5)
    backend.forward(q, k, v, engine.model.layers[1], batch)
    kv = engine.stored(1, batch)
    for x, codes, scales, scale in (
        (k, kv.k_codes_PHd, kv.k_scales_PHb, K_SCALE),
        (v, kv.v_codes_PHd, kv.v_scales_PHb, V_SCALE),
    ):
        wanted = quantize_nvfp4(x.cpu(), torch.tensor(scale))
        assert torch.equal(codes[batch.out_cache_loc].cpu(), pack_nibbles(wanted.codes_u8))
        assert torch.equal(scales[batch.out_cache_loc].cpu(), wanted.scales_u8)


def test_an_edit_of_the_table_after_the_replay_began_changes_nothing(engine: Engine) -> None:
    """SGLang edits its table as soon as it has launched a decode graph."""
    backend = TraceFp4Backend(engine)
    run(engine, backend, engine.batch("EXTEND", [1, 2], [10, 13], [10, 13]), [10, 13], 1)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    batch = engine.batch("DECODE", [1, 2], [11, 14], [1, 1])
    # Two rows of padding, as the graph runner fills them in.
    padding = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    batch.batch_size = 4
    batch.req_pool_indices = torch.cat((batch.req_pool_indices, padding))
    batch.seq_lens = torch.cat((batch.seq_lens, padding + fill))
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, padding))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_out_graph(batch)
    q, k, v = engine.qkv(4, 9)
    layer = engine.model.layers[0]
    engine.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
    wanted = expected(engine, 0, batch, q, [1, 1, 1, 1])
    engine.req_to_token_pool.req_to_token.fill_(7)
    out = backend.forward(q, k, v, layer, batch)
    assert worst_error(out[:2], wanted[:2]) < 1
    assert bool(out[2:].isfinite().all()), "padding is finite"


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_passes_of_speculation_are_refused(engine: Engine, mode: str) -> None:
    backend = TraceFp4Backend(engine)
    with pytest.raises(AttentionRefused, match=mode):
        backend.init_forward_metadata(engine.batch(mode, [1], [4], [4]))


def test_a_prefill_without_lengths_on_the_host_is_refused(engine: Engine) -> None:
    backend = TraceFp4Backend(engine)
    batch = engine.batch("EXTEND", [1], [4], [4])
    batch.seq_lens_cpu = None
    with pytest.raises(AttentionRefused, match=r"no lengths on the host .*choose another"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("extra", [{"sinks": torch.ones(4)}, {"k": None, "v": None}])
def test_what_a_layer_asks_for_beside_q_k_and_v_is_refused(
    engine: Engine, extra: dict[str, Any]
) -> None:
    backend = TraceFp4Backend(engine)
    batch = engine.batch("DECODE", [1], [1], [1])
    backend.init_forward_metadata(batch)
    q, k, v = engine.qkv(1, 0)
    given = {"q": q, "k": k, "v": v} | extra
    with pytest.raises(AttentionRefused, match=r"Layer 0 .*choose another"):
        backend.forward_decode(**given, layer=engine.model.layers[0], forward_batch=batch)


LAYER_CHANGES = {
    "a sliding window": {"sliding_window_size": 128},
    "a cap on its scores": {"logit_cap": 30.0},
    "attention to an encoder": {"is_cross_attention": True},
    "attention that is not causal": {"attn_type": "encoder_only"},
    "position encodings": {"pos_encoding_mode": "ALIBI"},
    "a temperature by length": {"xai_temperature_len": 8},
    "values of another size": {"v_head_dim": 32},
    "heads of 96": {"head_dim": 96},
}


@pytest.mark.parametrize("what", LAYER_CHANGES)
def test_a_layer_beyond_the_kernels_is_refused_by_its_number(engine: Engine, what: str) -> None:
    for name, value in LAYER_CHANGES[what].items():
        setattr(engine.model.layers[1], name, value)
    with pytest.raises(AttentionRefused, match=f"{what}.* in layer 1.*choose another"):
        TraceFp4Backend(engine)


def test_other_models_are_refused(engine: Engine) -> None:
    engine.model_config.has_attention_sinks = True
    with pytest.raises(AttentionRefused, match="attention sinks"):
        TraceFp4Backend(engine)
    engine.model_config.is_encoder_decoder = True
    with pytest.raises(AttentionRefused, match="an encoder"):
        TraceFp4Backend(engine)
    engine.dtype = torch.float16
    with pytest.raises(AttentionRefused, match="BF16"):
        TraceFp4Backend(engine)
    engine.token_to_kv_pool = object()
    with pytest.raises(AttentionRefused, match="keeps its keys and values in a object"):
        TraceFp4Backend(engine)


def test_sglang_makes_the_backend_under_its_name(engine: Engine) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert isinstance(ATTENTION_BACKENDS["trace_fp4"](engine), TraceFp4Backend)


def test_only_our_backend_may_read_the_cache(engine: Engine) -> None:
    method = engine.token_to_kv_pool.quant_method
    for phase in ("prefill", "decode"):
        access = method.resolve_attention_access(phase, "trace_fp4")
        assert access.kind.name == "NATIVE_FP4"
        assert method.resolve_attention_access(phase, "triton") is None
    assert not method.needs_plain_kv_dequant_read()
    assert not method.needs_dequant_workspace()


@pytest.mark.gpu
@needs_gpu
def test_a_decode_graph_follows_the_requests_without_a_wait() -> None:
    """Captured once with padding, replayed while requests grow and others take their rows."""
    engine = Engine(requests=8, context=600, q_heads=32, heads=4, size=128)
    backend = TraceFp4Backend(engine)
    rows, lengths = [3, 1, 8], [300, 17, 64]
    run(engine, backend, engine.batch("EXTEND", rows, lengths, lengths), lengths, 1)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    static = engine.batch("DECODE", [0] * 4, [1] * 4, [1] * 4)
    q, k, v = (x.clone() for x in engine.qkv(4, 2))
    layer = engine.model.layers[0]
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    for _ in range(2):
        backend.forward(q, k, v, layer, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(q, k, v, layer, static)
    for step in range(40):
        lengths = [length + 1 for length in lengths]
        batch = engine.batch("DECODE", rows, lengths, [1] * 3)
        fresh = engine.qkv(4, 100 + step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for target, source in zip((q, k, v), fresh, strict=True):
                target.copy_(source)
            for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
                getattr(static, name)[:3].copy_(getattr(batch, name))
            backend.init_forward_metadata_out_graph(static)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wanted = expected(engine, 0, batch, q[:3], [1] * 3)
        assert worst_error(out[:3], wanted) < 1, step
        assert bool(out[3:].isfinite().all())
    print("40 replays of a graph of 4 rows, 3 requests")
