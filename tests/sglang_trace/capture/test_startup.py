"""The line that a server logs when capture starts: once, and with everything that is recorded."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
from sglang.srt import runtime_context
from sglang.srt.distributed import parallel_state

from bridge.layout import Site
from sglang_trace.capture import capture, startup
from sglang_trace.capture.start_line import start_line
from sglang_trace.config import TraceConfig
from sglang_trace.preflight import hook_check, unsupported

ENDPOINT = "tcp://127.0.0.1:7707"
MODEL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
}


def model_runner() -> Any:
    text = SimpleNamespace(to_dict=lambda: dict(MODEL), num_experts=MODEL["num_experts"])
    hf_config = SimpleNamespace(get_text_config=lambda: text)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))


def line_of(**options: Any) -> str:
    config = TraceConfig(ENDPOINT, **options)
    shape = startup.model_shape(model_runner().model_config.hf_config)
    return start_line(config.layout(shape), config)


def test_the_line_says_sites_layers_bits_bytes_routes_and_endpoint() -> None:
    config = TraceConfig(ENDPOINT)
    layout = config.layout(startup.model_shape(model_runner().model_config.hf_config))
    assert start_line(layout, config) == (
        "trace capture records fc1,k,v of layers 3-5 (bits per code word: 1, per block scale: 8) "
        f"and routes of layers 0-5; {layout.bytes_per_token()} bytes per token; rows go to "
        f"{ENDPOINT}"
    )


def test_the_line_names_no_site_that_is_not_recorded() -> None:
    line = line_of(sites=(Site.FC1, Site.FC2), layers="0,2-4", bits=4, scale_bits=2)
    assert "fc1,fc2 of layers 0,2-4 (bits per code word: 4, per block scale: 2);" in line
    assert "routes" not in line


def test_a_line_of_routes_alone_has_no_bits() -> None:
    assert "records routes of layers 0-5;" in line_of(sites=(Site.ROUTES,))


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_one_rank_logs_one_line(
    rank: int, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = SimpleNamespace(weights_changed=lambda version: None, close=lambda: None)
    monkeypatch.setattr(hook_check, "check_scheduler", lambda: None)
    monkeypatch.setattr(unsupported, "check_model", lambda *_: None)
    monkeypatch.setattr(capture, "start", lambda *_: begun)
    monkeypatch.setattr(startup, "max_rows", lambda _: 8)
    monkeypatch.setattr(startup, "Finalize", lambda *_, **__: None)
    monkeypatch.setattr(
        runtime_context, "get_serving", lambda: SimpleNamespace(weight_version="v0")
    )
    ranks = SimpleNamespace(rank_in_group=rank)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: ranks)
    with caplog.at_level(logging.INFO, startup.__name__):
        startup.begin(model_runner(), TraceConfig(ENDPOINT))
    assert len(caplog.messages) == lines
    assert all("rows go to" in message for message in caplog.messages)
