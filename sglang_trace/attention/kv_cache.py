"""NVFP4 KV cache for hosts without FP4 units: in plain torch on a CPU, as kernels on a GPU.

What attention reads is what is stored: every key and value, the current token's included, goes
through the pool as code words and comes back dequantized. The trainer can therefore reproduce
attention without knowing where prefill chunks began.

Both methods keep the pool linear, [slot, head, byte], and use the arithmetic of `bridge.fp4.nvfp4`.

Shape legend: T tokens, S slots asked for, P slots of the pool, H KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
    KVCacheAttentionAccess,
    KVCacheAttentionAccessKind,
    KVCacheAttentionPhase,
    KVCacheBackendMatcher,
    NVFP4KVCacheMethod,
)
from torch import Tensor

from bridge.fp4.nvfp4 import NVFP4_BLOCK, Fp4Tensor, pack_nibbles, quantize_nvfp4, unpack_nibbles
from sglang_trace.config import ATTENTION_BACKEND
from sglang_trace.hardware import is_hopper
from sglang_trace.preflight import cpu_host


@dataclass(frozen=True)
class StoredKV:
    """The keys or the values of one layer, dequantized where they are looked at.

    Stands in for the BF16 buffer [P, H, D] that the torch_native backend indexes by slot: only the
    slots of running requests are ever decoded, never the whole pool.

    packed_PHd   uint8 [P, H, D/2], two code words a byte
    scales_PHb   uint8 [P, H, D/16], E4M3 block scales
    global_scale float32 []
    """

    packed_PHd: Tensor
    scales_PHb: Tensor
    global_scale: Tensor

    def __getitem__(self, slots_S: Tensor) -> Tensor:
        """Return the BF16 values [S, H, D] stored in these slots."""
        stored = Fp4Tensor(
            unpack_nibbles(self.packed_PHd[slots_S]),
            self.scales_PHb[slots_S],
            self.global_scale,
            NVFP4_BLOCK,
        )
        return stored.dequantize(torch.bfloat16)


class LinearNvfp4KVCacheMethod(NVFP4KVCacheMethod):  # type: ignore[misc]
    """SGLang's NVFP4 KV recipe with one scale each for K and V and block scales by slot."""

    # How the one backend that may read this cache reads it.
    attention_backend: str
    access: KVCacheAttentionAccessKind
    read_as: torch.dtype

    def __init__(self, num_layers: int, device: str, **layout: Any) -> None:
        # `layout` is the page size in releases whose native layout has pages; ours is linear.
        super().__init__(num_layers, device, **layout)

    def attention_accesses(self) -> tuple[KVCacheAttentionAccess, ...]:
        """Who may read this cache, in prefill and in decode."""
        return tuple(
            KVCacheAttentionAccess(
                phase,
                self.access,
                KVCacheBackendMatcher(exact=frozenset({self.attention_backend})),
                storage_dtype=torch.uint8,
                attention_kv_dtype=self.read_as,
                scale_recipe=self.name,
            )
            for phase in KVCacheAttentionPhase
        )

    def needs_linear_scale_buffer(self) -> bool:
        """Always: block scales lie beside their slot, [slot, head, block]."""
        return True


class TritonNvfp4KVCacheMethod(LinearNvfp4KVCacheMethod):
    """On a GPU: our kernels store, and our attention backend reads code words and scales."""

    attention_backend = ATTENTION_BACKEND
    access = KVCacheAttentionAccessKind.NATIVE_FP4
    read_as = torch.uint8

    def __init__(self, num_layers: int, device: str, **layout: Any) -> None:
        super().__init__(num_layers, device, **layout)
        # The backend reads nothing else, and SGLang makes the pool before it looks for backends.
        from sglang_trace.attention import backend

        backend.register()

    def quantize_and_store(
        self,
        k_buffer: Tensor,
        v_buffer: Tensor,
        k_scale_buffer: Tensor | None,
        v_scale_buffer: Tensor | None,
        loc: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        native_k_scale_buffer: Tensor | None = None,
        native_v_scale_buffer: Tensor | None = None,
    ) -> None:
        """Quantize keys and values [T, H, D] and store them in the slots `loc` [T]."""
        from sglang_trace.kernels.kv.store import store_kv

        assert k_scale_buffer is not None, "needs_linear_scale_buffer() makes the pool allocate it"
        assert v_scale_buffer is not None
        # The pool hands over the method's own scales, which lie on the device.
        assert k_scale is not None
        assert v_scale is not None
        pool = (k_buffer, k_scale_buffer, v_buffer, v_scale_buffer)
        store_kv(cache_k, cache_v, loc, k_scale, v_scale, *pool)


class TorchNvfp4KVCacheMethod(LinearNvfp4KVCacheMethod):
    """On a CPU: the reference arithmetic; the torch_native backend reads it as a BF16 cache."""

    attention_backend = cpu_host.ATTENTION_BACKEND
    access = KVCacheAttentionAccessKind.PLAIN
    read_as = torch.bfloat16

    def __init__(self, num_layers: int, device: str, **layout: Any) -> None:
        super().__init__(num_layers, device, **layout)
        self._value_buffers: frozenset[int] = frozenset()

    def create_buffers(
        self, size: int, head_num: int, head_dim: int, layer_num: int, device: str
    ) -> dict[str, Any]:
        """Allocate the pool and note which buffers hold values.

        The pool asks to dequantize a buffer without saying whether it holds keys or values, and
        the two have scales of their own.
        """
        buffers: dict[str, Any] = super().create_buffers(
            size, head_num, head_dim, layer_num, device
        )
        self._value_buffers = frozenset(buffer.data_ptr() for buffer in buffers["v_buffer"])
        return buffers

    def quantize_and_store(
        self,
        k_buffer: Tensor,
        v_buffer: Tensor,
        k_scale_buffer: Tensor | None,
        v_scale_buffer: Tensor | None,
        loc: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        native_k_scale_buffer: Tensor | None = None,
        native_v_scale_buffer: Tensor | None = None,
    ) -> None:
        """Quantize keys and values [T, H, D] and store them in the slots `loc` [T]."""
        _store(k_buffer, k_scale_buffer, loc, cache_k, k_scale)
        _store(v_buffer, v_scale_buffer, loc, cache_v, v_scale)

    def dequantize_kv_tensor(
        self,
        fp4_tensor: Tensor,
        scales: Tensor,
        layer_id: int,
        dtype: torch.dtype | None = None,
    ) -> StoredKV:
        """Return a view that decodes the slots it is indexed with."""
        holds_values = fp4_tensor.data_ptr() in self._value_buffers
        global_scales = self.v_scales_gpu if holds_values else self.k_scales_gpu
        return StoredKV(fp4_tensor, scales, global_scales[layer_id])


def _store(
    buffer: Tensor, scale_buffer: Tensor | None, loc: Tensor, values_THD: Tensor, scale: Any
) -> None:
    assert scale_buffer is not None, "needs_linear_scale_buffer() makes the pool allocate it"
    global_scale = torch.as_tensor(scale, dtype=torch.float32, device=buffer.device).reshape(())
    stored = quantize_nvfp4(values_THD, global_scale)
    buffer[loc] = pack_nibbles(stored.codes_u8)
    scale_buffer[loc] = stored.scales_u8


def register(methods: dict[str, type]) -> None:
    """Make `--kv-cache-dtype nvfp4` mean our method where SGLang has none.

    That is on a CPU and on Hopper; on a GPU with FP4 units it stays SGLang's own.
    """
    if cpu_host.is_cpu_host():
        methods[TorchNvfp4KVCacheMethod.name] = TorchNvfp4KVCacheMethod
    elif is_hopper():
        methods[TritonNvfp4KVCacheMethod.name] = TritonNvfp4KVCacheMethod
