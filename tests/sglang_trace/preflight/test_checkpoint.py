"""A checkpoint that is quantized already is refused from its small files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_trace.preflight.checkpoint import check_checkpoint, quantization_of
from sglang_trace.preflight.unsupported import NotCaptured

QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "modelopt, NVFP4": ({}, {"producer": {}, "quantization": {"quant_algo": "NVFP4"}}),
    "modelopt, FP8": ({}, {"quant_algo": "FP8"}),
    "modelopt, NVFP4, nested": (
        {"quantization_config": {"quant_method": "modelopt, NVFP4, nested"}},
        {},
    ),
    "compressed-tensors, nvfp4-pack-quantized": (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
            }
        },
        {},
    ),
    "compressed": ({"compression_config": {"format": "compressed"}}, {}),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, {}),
    "awq": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}),
    "gptq": ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, {}),
    "mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, {}),
    "in an unnamed way": ({"quantization_config": {"bits": 4}}, {}),
}


def checkpoint(place: Path, config: dict[str, Any], modelopt: dict[str, Any]) -> Any:
    (place / "config.json").write_text(json.dumps(config))
    if modelopt:
        (place / "hf_quant_config.json").write_text(json.dumps(modelopt))
    return SimpleNamespace(model_path=str(place), quantization="trace_nvfp4", load_format="auto")


@pytest.mark.parametrize("how", QUANTIZED)
def test_a_quantized_checkpoint_gets_a_sentence(how: str, tmp_path: Path) -> None:
    options = checkpoint(tmp_path, *QUANTIZED[how])
    with pytest.raises(NotCaptured) as refused:
        check_checkpoint(options)
    assert f"quantized already ({how})" in str(refused.value)
    assert "serve the BF16 checkpoint" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "load_format"), [("m.gguf", "auto"), ("m", "gguf"), ("m", "bitsandbytes")]
)
def test_a_quantized_file_format_gets_a_sentence(name: str, load_format: str) -> None:
    options = SimpleNamespace(model_path=name, quantization="trace_nvfp4", load_format=load_format)
    with pytest.raises(NotCaptured, match="quantized already"):
        check_checkpoint(options)


def test_a_directory_of_gguf_files_alone_gets_a_sentence(tmp_path: Path) -> None:
    options = checkpoint(tmp_path, {}, {})
    (tmp_path / "model.gguf").touch()
    with pytest.raises(NotCaptured, match="gguf"):
        check_checkpoint(options)
    (tmp_path / "model.safetensors").touch()
    check_checkpoint(options)


@pytest.mark.parametrize(
    "config", [{}, {"quantization_config": None}, {"quantization_config": {}}, {"text_config": {}}]
)
def test_a_checkpoint_that_is_not_quantized_is_taken(
    config: dict[str, Any], tmp_path: Path
) -> None:
    check_checkpoint(checkpoint(tmp_path, config, {"quantization": {"quant_algo": None}}))
    assert quantization_of(config, {}) is None


def test_other_methods_take_the_checkpoints_that_they_like(tmp_path: Path) -> None:
    options = checkpoint(tmp_path, *QUANTIZED["fp8"])
    options.quantization = "fp8"
    check_checkpoint(options)


@pytest.mark.parametrize("content", [None, "not JSON", "[]"])
def test_a_file_that_cannot_be_had_is_sglangs_to_complain_about(
    content: str | None, tmp_path: Path
) -> None:
    options = checkpoint(tmp_path, {}, {})
    if content is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_text(content)
    check_checkpoint(options)
