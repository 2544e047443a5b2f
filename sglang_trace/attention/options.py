"""How `--attention-backend trace_fp4` gets into SGLang's options."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

from sglang_trace.attention.unsupported import AttentionRefused
from sglang_trace.config import ATTENTION_BACKEND, KV_CACHE_DTYPE
from sglang_trace.hardware import is_hopper
from sglang_trace.preflight import cpu_host
from sglang_trace.preflight.server_options import backends_of

# Steps in which later releases resolve their options for an FP4 KV cache.
FP4_KV_CACHE_STEPS = ("handle_kv4_compatibility", "handle_nvfp4_prefill_kv_dequant_dtype")


def offer() -> None:
    """Let `--attention-backend` and its two variants take our backend."""
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])


def choose(options: argparse.Namespace) -> None:
    """Choose our backend where only it can read the KV cache that the user asks for.

    Raises:
        AttentionRefused: the user asks for another one.
    """
    if options.kv_cache_dtype == KV_CACHE_DTYPE and is_hopper():
        chosen = set(backends_of(options)) - {None, ATTENTION_BACKEND}
        if chosen:
            raise AttentionRefused(
                f"--kv-cache-dtype {KV_CACHE_DTYPE} is read by {ATTENTION_BACKEND} alone on this "
                f"GPU, not by {', '.join(sorted(map(str, chosen)))}: leave --attention-backend out."
            )
        options.attention_backend = ATTENTION_BACKEND
    if ATTENTION_BACKEND in backends_of(options) and options.cuda_graph_backend_prefill is None:
        options.cuda_graph_backend_prefill = "disabled"


def allow_fp4_kv_cache() -> None:
    """Skip SGLang's two steps that choose a backend for an FP4 KV cache, where we have one for it.

    They refuse a CPU and every GPU without FP4 units. A release without these replaceable steps has
    the first in a method that our patches edit, and not the second.
    """
    if importlib.util.find_spec("sglang.srt.arg_groups.resolution_hooks") is None:
        return
    from sglang.srt.arg_groups import kv_cache_hook
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    def skipped_if_read(server_args: Any, step: Callable[[Any], None]) -> None:
        if not _is_read(server_args):
            step(server_args)

    for name in FP4_KV_CACHE_STEPS:
        if hasattr(kv_cache_hook, name):
            register_resolution_hook(name)(skipped_if_read)


def _is_read(server_args: Any) -> bool:
    from sglang.srt.arg_groups.overrides import resolved_view

    backends = set(backends_of(resolved_view(server_args)))
    return cpu_host.is_cpu_host() or backends == {ATTENTION_BACKEND}
