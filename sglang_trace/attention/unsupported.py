"""Options and models that attention on FP4 keys and values does not support.

The server refuses them at start. When a combination works, remove its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bridge.errors import TraceError
from sglang_trace.config import ATTENTION_BACKEND, KV_CACHE_DTYPE
from sglang_trace.hardware import is_hopper
from sglang_trace.preflight.server_options import (
    COPYING_CACHES,
    DIFFUSION,
    DISAGGREGATION,
    NO_PREFILL_GRAPH,
    PARALLEL,
    PDMUX,
    PREFILL_GRAPH,
    SPECULATION,
    TWO_BATCH_OVERLAP,
    Option,
    Unsupported,
    backends_of,
    count_above_one,
    listed,
    switch,
)

_OTHER_POOLS = "it copies code words without their block scales"
_ONE_GPU = "it has run on one GPU only"


class AttentionRefused(TraceError):
    """The options or the model ask for attention that the kernels do not compute."""


UNSUPPORTED = (
    Unsupported(
        Option("another GPU than Hopper", lambda _options: not is_hopper()),
        "its kernels are made for Hopper",
        "leave --attention-backend out",
    ),
    Unsupported(
        Option(
            f"--kv-cache-dtype other than {KV_CACHE_DTYPE}",
            lambda options: options.kv_cache_dtype != KV_CACHE_DTYPE,
        ),
        "it reads code words and block scales",
        f"add --kv-cache-dtype {KV_CACHE_DTYPE}",
    ),
    Unsupported(
        Option(
            "another backend for prefill or decode",
            lambda options: set(backends_of(options)) != {ATTENTION_BACKEND},
        ),
        "no other backend reads this cache",
        f"give --attention-backend {ATTENTION_BACKEND} alone",
    ),
    Unsupported(SPECULATION, "it does not verify drafts"),
    Unsupported(PREFILL_GRAPH, "its prefill reads sizes on the host", NO_PREFILL_GRAPH),
    Unsupported(switch("enable_torch_compile"), "it has not run compiled"),
    Unsupported(count_above_one("tp_size"), _ONE_GPU),
    *(Unsupported(each, _ONE_GPU) for each in PARALLEL),
    *(Unsupported(each, _OTHER_POOLS) for each in COPYING_CACHES),
    Unsupported(DISAGGREGATION, _OTHER_POOLS),
    Unsupported(TWO_BATCH_OVERLAP, "two half batches would share its workspace"),
    Unsupported(PDMUX, "two streams would share its workspace"),
    Unsupported(DIFFUSION, "its attention is causal"),
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
    found = [row for row in UNSUPPORTED if row.applies(options)]
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
