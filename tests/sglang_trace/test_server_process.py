"""How SGLang's own parser and resolution take our defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_trace.attention.options import allow_fp4_kv_cache
from sglang_trace.config import TraceConfig
from sglang_trace.preflight import cpu_host
from sglang_trace.server_process import defaults, offer_choices, parse, resolved

pytestmark = pytest.mark.skipif(
    not cpu_host.is_cpu_host(), reason="this machine has an accelerator"
)


CAPTURE = TraceConfig("tcp://127.0.0.1:1")


@pytest.fixture(autouse=True)
def prepared() -> None:
    cpu_host.prepare()
    offer_choices()
    allow_fp4_kv_cache()


def options_of(checkpoint: Path, *arguments: str) -> dict[str, str]:
    chosen = defaults(CAPTURE)
    options = resolved(parse(["--model-path", str(checkpoint), *arguments], chosen))
    return {name: getattr(options, name) for name in chosen}


def test_where_the_user_chooses_nothing_our_defaults_hold(checkpoint: Path) -> None:
    assert options_of(checkpoint) == defaults(CAPTURE)
    assert {"quantization", "kv_cache_dtype", "device"} <= defaults(CAPTURE).keys()


def test_what_the_user_chooses_wins(checkpoint: Path, tmp_path: Path) -> None:
    assert options_of(checkpoint, "--kv-cache-dtype", "auto")["kv_cache_dtype"] == "auto"
    file = tmp_path / "options.yaml"
    file.write_text("kv-cache-dtype: auto\n")
    assert options_of(checkpoint, "--config", str(file))["kv_cache_dtype"] == "auto"


def test_sglangs_parser_is_left_as_it_was(checkpoint: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    before = ServerArgs.add_cli_args
    options_of(checkpoint)
    assert ServerArgs.add_cli_args is before


def test_without_capture_only_the_host_is_looked_at() -> None:
    assert {"quantization", "kv_cache_dtype"}.isdisjoint(defaults(None))
