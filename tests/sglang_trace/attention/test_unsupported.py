"""What the attention backend refuses in SGLang's options, and what it does not concern."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_trace.attention.unsupported import (
    UNSUPPORTED,
    AttentionRefused,
    check_arguments,
    is_asked_for,
)
from tests.sglang_trace.preflight.test_unsupported import GOOD
from tests.sglang_trace.preflight.test_upstream_api import Options, listed_names

OURS = GOOD | {"device": "cuda", "attention_backend": "trace_fp4", "enable_torch_compile": False}

BAD: dict[str, dict[str, Any]] = {
    "another GPU than Hopper": {},
    "--kv-cache-dtype": {"kv_cache_dtype": "auto"},
    "another backend for prefill or decode": {"prefill_attention_backend": "fa3"},
    "--speculative-algorithm": {"speculative_algorithm": "EAGLE"},
    "a prefill CUDA graph": {
        "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="tc_piecewise"))
    },
    "--enable-torch-compile": {"enable_torch_compile": True},
    "--tp-size": {"tp_size": 2},
    "--pp-size": {"pp_size": 2},
    "--dp-size": {"dp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--dcp-size": {"dcp_size": 2},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-hisparse": {"enable_hisparse": True},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--enable-kv-cache-sharding": {"enable_kv_cache_sharding": True},
    "--disaggregation-mode": {"disaggregation_mode": "decode"},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--dllm-algorithm": {"dllm_algorithm": "any"},
}


def check(changes: dict[str, Any]) -> None:
    check_arguments(SimpleNamespace(**OURS | changes))


def test_one_hopper_gpu_with_an_nvfp4_cache_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_trace.attention.unsupported.is_hopper", lambda: True)
    check({})
    check(
        {"attention_backend": None, "prefill_attention_backend": "trace_fp4"}
        | {"decode_attention_backend": "trace_fp4"}
    )


@pytest.mark.parametrize("flag", BAD)
def test_each_combination_is_refused_by_its_flag_with_a_remedy(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_trace.attention.unsupported.is_hopper", lambda: bool(BAD[flag]))
    with pytest.raises(
        AttentionRefused, match=rf"^--attention-backend trace_fp4 with {flag}.*: .*, so .*"
    ):
        check(BAD[flag])


def test_every_refusal_has_a_case_here() -> None:
    assert len(UNSUPPORTED) == len(BAD)


def test_options_concern_us_where_they_name_our_backend_at_all() -> None:
    for changes, asked in (
        ({}, True),
        ({"attention_backend": "fa3"}, False),
        ({"attention_backend": "fa3", "decode_attention_backend": "trace_fp4"}, True),
    ):
        assert is_asked_for(SimpleNamespace(**OURS | changes)) is asked


def test_every_option_that_is_refused_is_listed() -> None:
    read: set[str] = set()
    for row in UNSUPPORTED:
        row.applies(Options(read))
    assert {"enable_torch_compile", "decode_attention_backend"} <= read
    assert read <= listed_names("ServerArgs")
