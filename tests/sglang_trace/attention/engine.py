"""SGLang's own pools around our KV method: what the attention backend finds in an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor, nn

from sglang_trace.attention.kv_cache import TritonNvfp4KVCacheMethod
from sglang_trace.attention.paged_kv import PagedKV
from tests.sglang_trace.kernels.inputs import DEVICE

K_SCALE, V_SCALE = 0.5, 0.25


def make_pool(slots: int, heads: int, size: int, layers: int, page_size: int = 1) -> Any:
    """SGLang's pool with our method for GPUs, global scales other than 1."""
    method = TritonNvfp4KVCacheMethod(num_layers=layers, device=DEVICE)
    method.k_scales_gpu.fill_(K_SCALE)
    method.v_scales_gpu.fill_(V_SCALE)
    method.k_scales_float, method.v_scales_float = [K_SCALE] * layers, [V_SCALE] * layers
    return MHATokenToKVPool(
        slots,
        page_size,
        torch.float4_e2m1fn_x2,
        heads,
        size,
        layers,
        DEVICE,
        enable_memory_saver=False,
        quant_method=method,
    )


class Engine:
    """A model of attention layers alone, with the pools and lengths of its requests."""

    def __init__(
        self,
        requests: int = 4,
        context: int = 96,
        q_heads: int = 4,
        heads: int = 2,
        size: int = 64,
        layers: int = 2,
    ) -> None:
        self.context = context
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(
            [RadixAttention(q_heads, size, size**-0.5, heads, layer) for layer in range(layers)]
        )
        self.token_to_kv_pool = make_pool(requests * context, heads, size, layers)
        self.req_to_token_pool = ReqToTokenPool(requests, context, DEVICE, False)
        self.model_config = SimpleNamespace(is_encoder_decoder=False, has_attention_sinks=False)
        self.dtype = torch.bfloat16
        self.device = DEVICE
        # Slot 0 is that of padding.
        shuffled = torch.randperm(requests * context, generator=torch.Generator().manual_seed(0))
        table = self.req_to_token_pool.req_to_token
        table[1 : requests + 1] = (1 + shuffled.view(requests, context)).to(table)

    def batch(self, mode: str, rows: list[int], lengths: list[int], new: list[int]) -> Any:
        """A forward batch of the last `new` tokens of requests that have `lengths` by then."""
        table = self.req_to_token_pool.req_to_token
        slots = [
            table[row, length - each : length]
            for row, length, each in zip(rows, lengths, new, strict=True)
        ]
        return SimpleNamespace(
            forward_mode=ForwardMode[mode],
            batch_size=len(rows),
            req_pool_indices=torch.tensor(rows, device=DEVICE),
            seq_lens=torch.tensor(lengths, device=DEVICE),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens_cpu=new,
            out_cache_loc=torch.cat(slots).long(),
        )

    def qkv(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, HQ * D], keys and values [T, H, D]."""
        layer = self.model.layers[0]
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(tokens, heads, layer.head_dim, generator=generator).bfloat16().to(DEVICE)
            for heads in (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_k_head_num)
        )
        return q.flatten(1), k, v

    def stored(self, layer: int, batch: Any) -> PagedKV:
        """What the pool holds of a batch's requests."""
        k, v, k_scales, v_scales = self.token_to_kv_pool.get_raw_kv_buffer(layer)
        return PagedKV(
            k,
            k_scales.view(torch.uint8),
            v,
            v_scales.view(torch.uint8),
            self.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            1,
            K_SCALE,
            V_SCALE,
        )
