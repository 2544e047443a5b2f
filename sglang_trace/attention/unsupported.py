"""What attention on FP4 keys and values does not compute, and is refused at start.

One row a refusal. When a combination works, its row goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bridge.errors import TraceError
from sglang_trace.config import ATTENTION_BACKEND, KV_CACHE_DTYPE
from sglang_trace.hardware import is_hopper
from sglang_trace.preflight.unsupported import Refusal, above_one, backends_of, is_on, listed

_OTHER_POOLS = "it copies code words without their block scales"
_ONE_GPU = "it has run on one GPU only"


class AttentionRefused(TraceError):
    """The options or the model ask for attention that the kernels do not compute."""


REFUSALS = (
    Refusal(
        "another GPU than Hopper",
        lambda _options: not is_hopper(),
        "its kernels are made for Hopper",
        "leave --attention-backend out",
    ),
    Refusal(
        f"--kv-cache-dtype other than {KV_CACHE_DTYPE}",
        lambda options: options.kv_cache_dtype != KV_CACHE_DTYPE,
        "it reads code words and block scales",
        f"add --kv-cache-dtype {KV_CACHE_DTYPE}",
    ),
    Refusal(
        "another backend for prefill or decode",
        lambda options: set(backends_of(options)) != {ATTENTION_BACKEND},
        "no other backend reads this cache",
        f"give --attention-backend {ATTENTION_BACKEND} alone",
    ),
    Refusal(
        "--speculative-algorithm",
        is_on("speculative_algorithm"),
        "it does not verify drafts",
    ),
    Refusal(
        "a prefill CUDA graph",
        lambda options: options.cuda_graph_config.prefill.backend != "disabled",
        "its prefill reads sizes on the host",
        "add --cuda-graph-backend-prefill disabled",
    ),
    Refusal("--enable-torch-compile", is_on("enable_torch_compile"), "it has not run compiled"),
    Refusal("--tp-size above 1", above_one("tp_size"), _ONE_GPU),
    Refusal("--pp-size above 1", above_one("pp_size"), _ONE_GPU),
    Refusal("--dp-size above 1", above_one("dp_size"), _ONE_GPU),
    Refusal("--attn-cp-size above 1", above_one("attn_cp_size"), _ONE_GPU),
    Refusal("--dcp-size above 1", above_one("dcp_size"), _ONE_GPU),
    Refusal("--enable-hierarchical-cache", is_on("enable_hierarchical_cache"), _OTHER_POOLS),
    Refusal("--enable-lmcache", is_on("enable_lmcache"), _OTHER_POOLS),
    Refusal("--enable-flexkv", is_on("enable_flexkv"), _OTHER_POOLS),
    Refusal("--enable-hisparse", is_on("enable_hisparse"), _OTHER_POOLS),
    Refusal("--enable-unified-memory", is_on("enable_unified_memory"), _OTHER_POOLS),
    Refusal("--enable-kv-cache-sharding", is_on("enable_kv_cache_sharding"), _OTHER_POOLS),
    Refusal(
        "--disaggregation-mode",
        lambda options: options.disaggregation_mode != "null",
        _OTHER_POOLS,
    ),
    Refusal(
        "--enable-two-batch-overlap",
        is_on("enable_two_batch_overlap"),
        "two half batches would share its workspace",
    ),
    Refusal("--enable-pdmux", is_on("enable_pdmux"), "two streams would share its workspace"),
    Refusal("--dllm-algorithm", is_on("dllm_algorithm"), "its attention is causal"),
)


@dataclass(frozen=True)
class HeadSizes:
    """Heads of every attention layer of the model on this rank."""

    q_heads: int
    kv_heads: int
    size: int


def is_asked_for(options: Any) -> bool:
    """Whether SGLang's options, resolved or not, name our backend."""
    return ATTENTION_BACKEND in backends_of(options)


def check_arguments(options: Any) -> None:
    """Refuse what SGLang's resolved options rule out; they name our backend.

    Raises:
        AttentionRefused: naming every reason found.
    """
    found = [row for row in REFUSALS if row.applies(options)]
    if found:
        raise AttentionRefused(f"--attention-backend {ATTENTION_BACKEND} with {listed(found)}")


def check_model(model_runner: Any) -> HeadSizes:
    """Refuse what only the loaded model shows; returns the sizes of its heads.

    Raises:
        AttentionRefused: naming the first layer that asks for what the kernels do not compute.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = model_runner.token_to_kv_pool
    reader = getattr(getattr(pool, "quant_method", None), "attention_backend", None)
    if type(pool) is not MHATokenToKVPool or reader != ATTENTION_BACKEND:
        raise _refused(f"keeps its keys and values in a {type(pool).__name__}")
    if model_runner.dtype != torch.bfloat16:
        raise _refused(f"computes in {model_runner.dtype}, not BF16")
    if model_runner.model_config.is_encoder_decoder:
        raise _refused("has an encoder")
    if model_runner.model_config.has_attention_sinks:
        raise _refused("has attention sinks")
    layers = [each for each in model_runner.model.modules() if isinstance(each, RadixAttention)]
    sizes = {HeadSizes(each.tp_q_head_num, each.tp_k_head_num, each.head_dim) for each in layers}
    for layer in layers:
        if (what := _beyond_the_kernels(layer)) is not None:
            raise _refused(f"has {what} in layer {layer.layer_id}")
    if len(sizes) != 1:
        raise _refused("has layers with heads of different sizes")
    return sizes.pop()


def _beyond_the_kernels(layer: Any) -> str | None:
    """Return what an attention layer asks for that the kernels do not compute, None if nothing."""
    from sglang.srt.layers.radix_attention import AttentionType

    from sglang_trace.attention.extend import HEAD_DIMS

    asked = {
        "a sliding window": layer.sliding_window_size > 0,
        "a cap on its scores": bool(layer.logit_cap),
        "attention to an encoder": layer.is_cross_attention,
        "attention that is not causal": layer.attn_type != AttentionType.DECODER,
        "position encodings in its scores": layer.pos_encoding_mode != "NONE",
        "a temperature by length": layer.xai_temperature_len > 0,
        "values of another size than its keys": layer.v_head_dim != layer.qk_head_dim,
        f"heads of {layer.head_dim} (there are kernels for {', '.join(map(str, HEAD_DIMS))})": (
            layer.head_dim not in HEAD_DIMS
        ),
    }
    return next((what for what, applies in asked.items() if applies), None)


def _refused(what: str) -> AttentionRefused:
    return AttentionRefused(
        f"The model {what}, which {ATTENTION_BACKEND} does not compute: choose another "
        "--attention-backend and leave --kv-cache-dtype out."
    )
