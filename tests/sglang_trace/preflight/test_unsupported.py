from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from bridge.layout import Site
from sglang_trace.config import DEFAULT_SITES, TraceConfig
from sglang_trace.preflight.unsupported import (
    GPU_RELEASE,
    UNSUPPORTED,
    NotCaptured,
    check_arguments,
)

# Options of a server that is captured, as SGLang resolves them.
GOOD: dict[str, Any] = {
    "device": "cpu",
    "moe_runner_backend": "auto",
    "tp_size": 1,
    "ep_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "moe_dp_size": 1,
    "enable_attn_tp_input_scattered": False,
    "speculative_algorithm": None,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_hisparse": False,
    "enable_unified_memory": False,
    "enable_kv_cache_sharding": False,
    "enable_streaming_session": False,
    "disaggregation_mode": "null",
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "dllm_algorithm": None,
    "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="disabled")),
    "enable_eplb": False,
    "ep_num_redundant_experts": 0,
    "enable_lora": None,
    "lora_paths": None,
    "is_embedding": False,
    "warmups": None,
    "enable_mis": False,
    "use_ray": False,
    "enable_paged_experts": False,
    "kt_weight_path": None,
    "quantization": "trace_nvfp4",
    "kv_cache_dtype": "nvfp4",
    "attention_backend": "torch_native",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
}

# Options that not every supported release has, and the first that has them.
ADDED_LATER = {"enable_kv_cache_sharding": "0.5.22", "enable_paged_experts": "0.5.23"}

BAD: dict[str, dict[str, Any]] = {
    "--device other than cpu and cuda": {"device": "xpu"},
    "--device cuda with another sglang": {"device": "cuda", "attention_backend": "trace_fp4"},
    "--moe-runner-backend": {"moe_runner_backend": "flashinfer_trtllm"},
    "--tp-size above 1 with --device cuda": {
        "tp_size": 2,
        "device": "cuda",
        "kv_cache_dtype": "auto",
    },
    "--tp-size above 1 with another sglang": {"tp_size": 2},
    "--moe-dp-size": {"moe_dp_size": 2},
    "--enable-attn-tp-input-scattered": {"enable_attn_tp_input_scattered": True},
    "--ep-size": {"ep_size": 2},
    "--dp-size": {"dp_size": 2},
    "--pp-size": {"pp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--dcp-size": {"dcp_size": 2},
    "--speculative-algorithm": {"speculative_algorithm": "EAGLE"},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--warmups": {"warmups": "voice_chat"},
    "--enable-mis": {"enable_mis": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-hisparse": {"enable_hisparse": True},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--enable-kv-cache-sharding": {"enable_kv_cache_sharding": True},
    "--enable-streaming-session": {"enable_streaming_session": True},
    "--disaggregation-mode": {"disaggregation_mode": "prefill"},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--dllm-algorithm": {"dllm_algorithm": "any"},
    "a prefill CUDA graph": {
        "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="tc_piecewise"))
    },
    "--enable-eplb": {"ep_num_redundant_experts": 4},
    "--enable-lora": {"lora_paths": ["adapter"]},
    "--is-embedding": {"is_embedding": True},
    "--use-ray": {"use_ray": True},
    "--enable-paged-experts": {"enable_paged_experts": True},
}


def check(changes: dict[str, Any], sites: tuple[Site, ...] = DEFAULT_SITES) -> None:
    check_arguments(SimpleNamespace(**{**GOOD, **changes}), TraceConfig("tcp://x", sites))


def test_a_plain_server_is_captured() -> None:
    check({})


@pytest.mark.parametrize("flag", BAD)
def test_each_combination_is_refused_by_its_flag_with_a_remedy(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_trace.preflight.unsupported.version", lambda _package: "0.5.99")
    with pytest.raises(NotCaptured, match=f"^{flag}.*: .*, so .*"):
        check(BAD[flag])


# Everything that `--speculative-algorithm` takes in some supported release; NEXTN is its name for
# EAGLE with the model's own draft head, and a plug-in may register others.
SPECULATION = frozenset(
    {
        *("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP", "STANDALONE", "NGRAM"),
        *("DFLASH", "DSPARK", "UNO", "A_PLUGINS_OWN"),
    }
)


@pytest.mark.parametrize("drafts", [1, None, 4])
@pytest.mark.parametrize("algorithm", sorted(SPECULATION))
def test_speculation_is_refused_by_chains_as_by_trees(algorithm: str, drafts: int | None) -> None:
    """With one draft a step (a chain) and several (a tree)."""
    with pytest.raises(NotCaptured, match=r"^--speculative-algorithm: rejected drafts.*leave it"):
        check({"speculative_algorithm": algorithm, "speculative_eagle_topk": drafts})


def test_the_installed_sglang_has_no_speculation_that_is_not_tried_here() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    assert {each.name for each in SpeculativeAlgorithm} - {"NONE"} <= SPECULATION


def test_a_forward_pass_of_speculation_would_not_be_recorded_even_so() -> None:
    """Target verification is neither prefill nor decode for the capture, whatever was refused."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_trace.capture.capture import ForwardNotUnderstood, spans_of
    from sglang_trace.requests.rollouts import Rollouts

    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        with pytest.raises(ForwardNotUnderstood, match=mode.name):
            spans_of(SimpleNamespace(forward_mode=mode), Rollouts())


def test_every_refusal_has_a_case_here() -> None:
    assert len(UNSUPPORTED) == len(BAD)


def test_a_gpu_records_keys_and_values_that_our_attention_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_trace.preflight.unsupported.version", lambda _package: GPU_RELEASE)
    check({"device": "cuda", "attention_backend": "trace_fp4"})
    plain = {"device": "cuda", "kv_cache_dtype": "auto", "attention_backend": "triton"}
    check(plain, (Site.FC1, Site.FC2, Site.ROUTES))
    for site in (Site.K, Site.V):
        with pytest.raises(NotCaptured, match=r"^--kv-cache-dtype auto.*k and v with --device"):
            check(plain, (Site.FC1, site))
    split = {"decode_attention_backend": "trtllm_mha"}
    with pytest.raises(NotCaptured, match=r"^k and v with --device cuda.*--trace-sites fc1"):
        check({"device": "cuda", "attention_backend": "trace_fp4"} | split)


def test_an_option_that_a_release_does_not_have_is_not_on() -> None:
    options = {name: value for name, value in GOOD.items() if name not in ADDED_LATER}
    check_arguments(SimpleNamespace(**options), TraceConfig("tcp://x"))


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(NotCaptured, match=r"--ep-size.*--enable-lmcache"):
        check({"ep_size": 4, "enable_lmcache": True})


def test_sites_ask_for_what_they_are_recorded_from() -> None:
    with pytest.raises(NotCaptured, match="--quantization fp8"):
        check({"quantization": "fp8"}, (Site.FC1,))
    with pytest.raises(NotCaptured, match="--kv-cache-dtype auto"):
        check({"kv_cache_dtype": "auto"}, (Site.V,))
    check({"kv_cache_dtype": "auto"}, (Site.FC1, Site.ROUTES))
    check({"quantization": None}, (Site.K, Site.V))


def test_the_names_are_those_of_sglangs_resolved_options() -> None:
    from sglang.srt.server_args import ServerArgs

    installed = Version(metadata.version("sglang"))
    for name in GOOD:
        expected = installed >= Version(ADDED_LATER.get(name, "0"))
        assert hasattr(ServerArgs, name) is expected, name
