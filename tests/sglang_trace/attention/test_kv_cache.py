"""The NVFP4 KV method against the reference arithmetic, bit for bit, in SGLang's own pool."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method

from bridge.fp4.nvfp4 import quantize_nvfp4, unpack_nibbles
from sglang_trace.attention.kv_cache import TorchNvfp4KVCacheMethod

SLOTS, HEADS, HEAD_DIM, LAYERS = 12, 2, 32, 2
K_SCALE, V_SCALE = 0.25, 0.013


@pytest.fixture
def method() -> TorchNvfp4KVCacheMethod:
    made = get_kv_cache_quant_method("nvfp4", num_layers=LAYERS, device="cpu")
    assert isinstance(made, TorchNvfp4KVCacheMethod), "the patched registry offers our method"
    made.k_scales_gpu.fill_(K_SCALE)
    made.v_scales_gpu.fill_(V_SCALE)
    return made


def stored(method: TorchNvfp4KVCacheMethod, slots: torch.Tensor, seed: int):
    """Store random keys and values in `slots` of layer 1; return buffers and what was stored."""
    buffers = method.create_buffers(SLOTS, HEADS, HEAD_DIM, LAYERS, "cpu")
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(len(slots), HEADS, HEAD_DIM, generator=generator).bfloat16() for _ in range(2)
    )
    names = ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")
    layer = [buffers[name][1] for name in names]
    scales = (method.k_scales_gpu[1:2], method.v_scales_gpu[1:2])
    method.quantize_and_store(*layer, slots, keys, values, *scales)
    return layer, keys, values


def test_stored_codes_are_the_reference_quantizers(method: TorchNvfp4KVCacheMethod) -> None:
    slots = torch.tensor([3, 7, 5])
    (k, v, k_scales, v_scales), keys, values = stored(method, slots, seed=0)
    for packed, scales, raw, scale in (
        (k, k_scales, keys, K_SCALE),
        (v, v_scales, values, V_SCALE),
    ):
        expected = quantize_nvfp4(raw, torch.tensor(scale))
        assert torch.equal(unpack_nibbles(packed[slots]), expected.codes_u8)
        assert torch.equal(scales[slots], expected.scales_u8)


def test_attention_reads_what_is_stored_with_the_scale_of_keys_or_values(
    method: TorchNvfp4KVCacheMethod,
) -> None:
    slots = torch.tensor([1, 11])
    (k, v, k_scales, v_scales), keys, values = stored(method, slots, seed=1)
    for packed, scales, raw, scale in (
        (k, k_scales, keys, K_SCALE),
        (v, v_scales, values, V_SCALE),
    ):
        read = method.dequantize_kv_tensor(packed, scales, layer_id=1)[slots]
        expected = quantize_nvfp4(raw, torch.tensor(scale)).dequantize(torch.bfloat16)
        assert torch.equal(read, expected)
        assert read.dtype == torch.bfloat16


def test_other_slots_stay_as_they_were(method: TorchNvfp4KVCacheMethod) -> None:
    (k, _v, k_scales, _v_scales), _keys, _values = stored(method, torch.tensor([4]), seed=2)
    others = [slot for slot in range(SLOTS) if slot != 4]
    assert not k[others].any()
    assert not k_scales[others].any()


def test_the_pool_is_asked_for_scales_beside_their_slots(method: TorchNvfp4KVCacheMethod) -> None:
    if hasattr(method, "configure_attention_backends"):
        method.configure_attention_backends("torch_native", "torch_native")
    buffers = method.create_buffers(SLOTS, HEADS, HEAD_DIM, LAYERS, "cpu")
    assert buffers["k_scale_buffer"][0].shape == (SLOTS, HEADS, HEAD_DIM // 16)
    assert buffers["dq_k_buffer"] is None
    assert buffers.get("native_k_scale_buffer") is None
    assert method.compute_cell_size(HEADS, HEAD_DIM, LAYERS, 1) == 2 * LAYERS * HEADS * (
        HEAD_DIM // 2 + HEAD_DIM // 16
    )
