"""SGLang's attention backend `trace_fp4`: decode and prefill on the code words of the KV pool.

Every KV slot of SGLang's pool is a page of one token here, so SGLang's page size does not matter:
its table of requests has a KV slot for every position.

Shape legend: T tokens of a pass, B requests, R rows of SGLang's table, C its columns (the longest
context), M most requests of a decode graph, HQ query heads, H KV heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from sglang_trace import failure
from sglang_trace.attention.extend_flash import extend_flash
from sglang_trace.attention.extend_pieces import Piece, pieces_of
from sglang_trace.attention.paged_kv import PagedKV
from sglang_trace.attention.triton_decode import TritonDecode
from sglang_trace.attention.unsupported import AttentionRefused, HeadSizes, check_model
from sglang_trace.config import ATTENTION_BACKEND
from sglang_trace.kernels.kv.slot_table import copy_kv_slots

logger = logging.getLogger(__name__)

# A padding row of a decode graph attends to one key, whichever lies in its slot: finite output.
PADDING_LENGTH = 1
PAGE_SIZE = 1


# `decode.PagedDecode`, or what stands in for it.
Decode = Callable[..., Tensor]


@dataclass(frozen=True)
class Batch:
    """Where the keys of each request of a pass are.

    table_RC   int32 [R, C], a slot for every position
    rows_B     the row of each request
    lengths_B  keys of each request, those of this pass included
    """

    table_RC: Tensor
    rows_B: Tensor
    lengths_B: Tensor


class TraceFp4Backend(AttentionBackend):  # type: ignore[misc]
    """Reads what the pool's NVFP4 method has stored; one per scheduler process."""

    # Decode reads lengths on the GPU only, and prefill's are on the host anyway: without drafts,
    # which are refused, SGLang counts them there.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        """Check the model and allocate what decode needs.

        Raises:
            AttentionRefused: for what the kernels do not compute.
        """
        super().__init__()
        self._sizes = check_model(model_runner)
        # SGLang's models and forward context ask the backend for the pools, by these names.
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._scales = self.token_to_kv_pool.quant_method
        self._table_RC: Tensor = self.req_to_token_pool.req_to_token
        self._device = model_runner.device
        self._max_batch = int(self.req_to_token_pool.size)
        self._decode = make_decode(self._sizes, self._max_batch, self._device)
        self._batch: Batch | None = None
        self._pieces: list[Piece] | None = None
        # Of decode graphs.
        self._copy_MC: Tensor | None = None
        self._order_M: Tensor | None = None

    # --- where the keys are

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Note a pass that runs outside a graph: SGLang waits for it before it edits the table."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        rows_B, lengths_B = forward_batch.req_pool_indices, forward_batch.seq_lens
        self._batch = Batch(self._table_RC, rows_B, lengths_B)
        if mode.is_decode():
            return
        if not mode.is_extend_without_speculative():
            raise AttentionRefused(
                f"{ATTENTION_BACKEND} does not compute a forward pass of mode {mode.name}: switch "
                "the feature that makes it off or choose another --attention-backend."
            )
        if forward_batch.seq_lens_cpu is None:
            raise AttentionRefused(
                f"SGLang has no lengths on the host for a pass of mode {mode.name}, which "
                f"{ATTENTION_BACKEND} divides by them: choose another --attention-backend."
            )
        self._pieces = pieces_of(
            forward_batch.extend_seq_lens_cpu,
            forward_batch.seq_lens_cpu.tolist(),
            heads=self._sizes.kv_heads,
            size=self._sizes.size,
            device=self._device,
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what decode graphs read instead of SGLang's table."""
        if max_bs > self._max_batch:
            self._max_batch = max_bs
            self._decode = make_decode(self._sizes, max_bs, self._device)
        self._copy_MC = self._table_RC.new_zeros((max_bs, self._table_RC.shape[1]))
        self._order_M = torch.arange(max_bs, device=self._device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Copy the batch's slots for the graph that is captured or replayed next."""
        assert self._copy_MC is not None
        assert self._order_M is not None
        batch = forward_batch.batch_size
        rows_B, lengths_B = forward_batch.req_pool_indices[:batch], forward_batch.seq_lens[:batch]
        copy_kv_slots(self._table_RC, rows_B, lengths_B, self._copy_MC)
        if in_capture:
            # The runner's own buffers: at a replay they hold that pass' lengths.
            self._batch = Batch(self._copy_MC, self._order_M[:batch], lengths_B)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row."""
        return PADDING_LENGTH

    # --- attention

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> Tensor:
        """Store keys and values [B, H, D] and attend with one token per request: [B, HQ * D]."""
        self._store(layer, forward_batch, k, v, save_kv_cache, extras)
        q_BHD = q.reshape(-1, self._sizes.q_heads, self._sizes.size).contiguous()
        out_BHD = torch.empty_like(q_BHD)
        self._decode(q_BHD, self._paged_kv(layer), sm_scale=layer.scaling, out_BHD=out_BHD)
        return out_BHD.flatten(1)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> Tensor:
        """Store keys and values [T, H, D] and attend with the requests' new tokens: [T, HQ * D]."""
        self._store(layer, forward_batch, k, v, save_kv_cache, extras)
        assert self._pieces is not None
        q_THD = q.reshape(-1, self._sizes.q_heads, self._sizes.size)
        out_THD = q_THD.new_empty(q_THD.shape)
        extend_flash(
            q_THD,
            self._paged_kv(layer),
            self._pieces,
            sm_scale=layer.scaling,
            out_THD=out_THD,
        )
        return out_THD.flatten(1)

    def _store(
        self,
        layer: Any,
        forward_batch: Any,
        k: Tensor | None,
        v: Tensor | None,
        save_kv_cache: bool,
        extras: dict[str, Any],
    ) -> None:
        given = [name for name, value in extras.items() if value is not None]
        if k is None or v is None or not save_kv_cache or given:
            missing = "keys and values of its own" if not given else ", ".join(given)
            raise AttentionRefused(
                f"Layer {layer.layer_id} attends in a way that {ATTENTION_BACKEND} does not "
                f"compute ({missing}): choose another --attention-backend and a BF16 KV cache."
            )
        self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)

    def _paged_kv(self, layer: Any) -> PagedKV:
        """Return the pool's keys and values of a layer for the requests of the pass."""
        assert self._batch is not None
        k, v, k_scales, v_scales = self.token_to_kv_pool.get_raw_kv_buffer(layer.layer_id)
        k_scale, v_scale = self._scales.get_bmm_scales(layer.layer_id)
        return PagedKV(
            k,
            k_scales.view(torch.uint8),
            v,
            v_scales.view(torch.uint8),
            self._batch.table_RC,
            self._batch.rows_B,
            self._batch.lengths_B,
            PAGE_SIZE,
            k_scale,
            v_scale,
        )


def make_decode(sizes: HeadSizes, max_batch: int, device: torch.device | str) -> Decode:
    """Return the decode kernel for these heads: CUDA C++ where a compiler is, Triton elsewhere."""
    decode: Decode = _decode_class()(
        num_q_heads=sizes.q_heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.size,
        max_batch=max_batch,
        device=device,
    )
    return decode


def _decode_class() -> Any:
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is not None:
        from sglang_trace.attention.decode import PagedDecode

        return PagedDecode
    logger.warning(
        "There is no CUDA compiler, so decode attention runs as a Triton kernel that is slow for "
        "long contexts: install CUDA's nvcc and set CUDA_HOME."
    )
    return TritonDecode


def register() -> None:
    """Make `--attention-backend trace_fp4` mean this backend, in this process."""

    def create(model_runner: Any) -> TraceFp4Backend:
        with failure.reported():
            return TraceFp4Backend(model_runner)

    register_attention_backend(ATTENTION_BACKEND)(create)
