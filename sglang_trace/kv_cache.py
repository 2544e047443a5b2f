"""NVFP4 KV cache in plain torch, for hosts without FP4 units.

What attention reads is what is stored: every key and value, the current token's included, goes
through the pool as code words and comes back dequantized. The trainer can therefore reproduce
attention without knowing where prefill chunks began.

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

from bridge.fp4 import NVFP4_BLOCK, Fp4Tensor, pack_nibbles, quantize_nvfp4, unpack_nibbles
from sglang_trace.cpu_host import ATTENTION_BACKEND


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


class TorchNvfp4KVCacheMethod(NVFP4KVCacheMethod):  # type: ignore[misc]
    """SGLang's NVFP4 KV recipe with our reference arithmetic and one scale each for K and V."""

    def __init__(self, num_layers: int, device: str, **layout: Any) -> None:
        # `layout` is the page size in releases whose native layout has pages; ours is linear.
        super().__init__(num_layers, device, **layout)
        self._value_buffers: frozenset[int] = frozenset()

    def attention_accesses(self) -> tuple[KVCacheAttentionAccess, ...]:
        """Who may read this cache: the torch_native backend, as if it were a BF16 one."""
        return tuple(
            KVCacheAttentionAccess(
                phase,
                KVCacheAttentionAccessKind.PLAIN,
                KVCacheBackendMatcher(exact=frozenset({ATTENTION_BACKEND})),
                storage_dtype=torch.uint8,
                attention_kv_dtype=torch.bfloat16,
                scale_recipe=self.name,
            )
            for phase in KVCacheAttentionPhase
        )

    def needs_linear_scale_buffer(self) -> bool:
        """Always: block scales lie beside their slot, [slot, head, block]."""
        return True

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
    """Make `--kv-cache-dtype nvfp4` mean this method."""
    methods[TorchNvfp4KVCacheMethod.name] = TorchNvfp4KVCacheMethod
