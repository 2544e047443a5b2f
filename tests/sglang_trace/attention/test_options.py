"""How SGLang's own parser and resolution take our attention backend."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from sglang_trace.attention import options
from sglang_trace.attention.unsupported import AttentionRefused
from sglang_trace.preflight import cpu_host
from sglang_trace.server_process import offer_choices, parse, resolved

pytestmark = pytest.mark.skipif(
    not cpu_host.is_cpu_host(), reason="this machine has an accelerator"
)


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_host.prepare()
    offer_choices()
    options.allow_fp4_kv_cache()
    monkeypatch.setattr(options, "is_hopper", lambda: True)


def chosen(*arguments: str) -> argparse.Namespace:
    """What the parser of one of SGLang's processes makes of these options."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(["--model-path", "m", *arguments])
    options.choose(found)
    return found


def test_an_nvfp4_cache_on_hopper_is_read_by_our_backend_without_prefill_graphs() -> None:
    found = chosen("--kv-cache-dtype", "nvfp4")
    assert found.attention_backend == "trace_fp4"
    assert found.cuda_graph_backend_prefill == "disabled"


def test_another_cache_and_another_gpu_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen().attention_backend is None
    assert chosen("--attention-backend", "fa3").attention_backend == "fa3"
    monkeypatch.setattr(options, "is_hopper", lambda: False)
    assert chosen("--kv-cache-dtype", "nvfp4").attention_backend is None
    assert chosen("--kv-cache-dtype", "nvfp4").cuda_graph_backend_prefill is None


def test_what_the_user_chooses_about_prefill_graphs_stays() -> None:
    found = chosen("--kv-cache-dtype", "nvfp4", "--cuda-graph-backend-prefill", "full")
    assert found.cuda_graph_backend_prefill == "full", "it is refused later, by its name"


@pytest.mark.parametrize("flag", ["attention", "prefill-attention", "decode-attention"])
def test_a_backend_that_does_not_read_the_cache_is_refused(flag: str) -> None:
    with pytest.raises(AttentionRefused, match=r"trace_fp4 alone on this GPU, not by triton"):
        chosen("--kv-cache-dtype", "nvfp4", f"--{flag}-backend", "triton")


def test_sglang_resolves_its_options_with_our_backend(checkpoint: Path) -> None:
    """Its steps for an FP4 KV cache would refuse every backend that is not in their lists."""
    arguments = ["--model-path", str(checkpoint), "--kv-cache-dtype", "nvfp4"]
    found: Any = resolved(parse(arguments, {"device": "cpu"}))
    assert found.attention_backend == "trace_fp4"
    assert found.kv_cache_dtype == "nvfp4"


def check_fp4_kv_cache(server_args: Any) -> None:
    """SGLang's step that refuses an FP4 KV cache: a method that we patch, or one that we wrap."""
    if hasattr(server_args, "_handle_kv4_compatibility"):
        server_args._handle_kv4_compatibility()
        return
    from sglang.srt.arg_groups import kv_cache_hook
    from sglang.srt.arg_groups.resolution_hooks import run_hook

    run_hook(kv_cache_hook.handle_kv4_compatibility, server_args)


def test_sglang_still_refuses_this_cache_to_its_own_backends(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import server_args as module

    common = ["--model-path", str(checkpoint), "--kv-cache-dtype", "nvfp4"]
    ours = parse(common, {"device": "cpu"})
    monkeypatch.setattr(options, "choose", lambda _parsed: None)
    theirs = parse([*common, "--attention-backend", "triton"], {"device": "cpu"})
    # As on a GPU, whose refusal earlier releases have in the same step.
    monkeypatch.setattr(cpu_host, "is_cpu_host", lambda: False)
    monkeypatch.setattr(module, "is_cuda", lambda: True, raising=False)
    check_fp4_kv_cache(ours)
    with pytest.raises(RuntimeError, match=r"Blackwell|non-CUDA"):
        check_fp4_kv_cache(theirs)
