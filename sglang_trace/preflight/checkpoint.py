"""Refuse a checkpoint that is quantized already, before gigabytes of it are loaded.

Our experts are quantized from BF16. What a quantized checkpoint holds are code words of another
recipe, in whose scales and layout nothing here looks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_trace.config import QUANTIZATION
from sglang_trace.preflight.unsupported import NotCaptured

# Files that say how a checkpoint is quantized, and the entries of theirs that do.
CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
ENTRIES = ("quantization_config", "compression_config")
# Loaders of formats that are quantized by their nature.
QUANTIZED_FORMATS = frozenset({"gguf", "bitsandbytes"})


def check_checkpoint(options: Any) -> None:
    """Refuse a quantized checkpoint for experts that we quantize; reads its small files only.

    A file that cannot be had is no reason: SGLang says what is wrong with it.

    Raises:
        NotCaptured: naming how the checkpoint is quantized.
    """
    if options.quantization != QUANTIZATION:
        return
    path = str(options.model_path)
    if (found := quantized_format(path, options.load_format)) is None:
        revision = getattr(options, "revision", None)
        found = quantization_of(read(path, CONFIG, revision), read(path, MODELOPT_CONFIG, revision))
    if found is not None:
        raise NotCaptured(
            f"The checkpoint {path} is quantized already ({found}), and --quantization "
            f"{QUANTIZATION} quantizes the experts of a BF16 checkpoint itself; serve the BF16 "
            "checkpoint that it was made of."
        )


def quantized_format(path: str, load_format: Any) -> str | None:
    """Return the name of a quantized file format, None if the checkpoint has none."""
    name = str(getattr(load_format, "value", load_format)).lower()
    if path.lower().endswith(".gguf"):
        return "gguf"
    if name in QUANTIZED_FORMATS:
        return name
    # SGLang looks for such files where there are no others.
    place = Path(path)
    has_only_gguf = place.is_dir() and any(place.glob("*.gguf")) and not any(place.glob("*.safet*"))
    return "gguf" if has_only_gguf else None


def quantization_of(config: Mapping[str, Any], modelopt: Mapping[str, Any]) -> str | None:
    """Return how the two files say that a checkpoint is quantized, None if they do not."""
    for entry in _entries(config):
        names = [
            str(entry[key]) for key in ("quant_method", "quant_algo", "format") if key in entry
        ]
        return ", ".join(names) or "in an unnamed way"
    # Also without the level between.
    recipe = modelopt.get("quantization", modelopt)
    algorithm = recipe.get("quant_algo") if isinstance(recipe, Mapping) else None
    return f"modelopt, {algorithm}" if algorithm else None


def _entries(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what a model's configuration, or that of its language model, says of quantization."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            if name in ENTRIES:
                yield value
            elif name.endswith("_config"):
                yield from _entries(value)


def read(path: str, name: str, revision: str | None) -> Mapping[str, Any]:
    """Return a JSON file of a checkpoint, in a directory or on the hub; {} if it cannot be had."""
    from transformers.utils import cached_file

    try:
        found = cached_file(
            path,
            name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        held = json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, Mapping) else {}
