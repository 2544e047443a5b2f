"""The sizes of a model that a record depends on, and how users name its layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from bridge.errors import LayoutError
from bridge.formats import NVFP4_BLOCK

# Bounds on a shape from outside, checked before anything is allocated for it.
MAX_LAYERS = 512
MAX_TOP_K = 64
MAX_WIDTH = 1 << 20

_MODEL_TYPES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a record depends on.

    `moe_layers` and `attention_layers` are layer indices: hybrid models have full attention, and so
    a KV cache, in some layers only. A dense model has no MoE layer, and 0 for the sizes of experts.
    """

    num_layers: int
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    num_kv_heads: int
    head_dim: int
    moe_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        check_range("num_layers", self.num_layers, 1, MAX_LAYERS)
        check_range("num_kv_heads", self.num_kv_heads, 1, MAX_WIDTH // NVFP4_BLOCK)
        for name in ("hidden_size", "head_dim"):
            self._check_width(name)
        if self.moe_layers:
            self._check_width("moe_intermediate_size")
            check_range("num_experts", self.num_experts, 1, 1 << 16)
            check_range("top_k", self.top_k, 1, min(self.num_experts, MAX_TOP_K))
        elif self.num_experts or self.top_k or self.moe_intermediate_size:
            raise LayoutError(
                "The model has experts and no MoE layer: name its MoE layers, or give 0 for "
                "num_experts, top_k and moe_intermediate_size of a dense model."
            )
        check_layers("moe_layers", self.moe_layers, self.num_layers)
        check_layers("attention_layers", self.attention_layers, self.num_layers)

    def _check_width(self, name: str) -> None:
        width = getattr(self, name)
        check_range(name, width, NVFP4_BLOCK, MAX_WIDTH)
        if width % NVFP4_BLOCK:
            raise LayoutError(f"{name} is {width}: NVFP4 needs a multiple of {NVFP4_BLOCK}.")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the shape from a Hugging Face config of the Qwen3 MoE families.

        Raises:
            LayoutError: for another model type or a config without a needed entry.
        """
        text = config.get("text_config", config)
        if text.get("model_type") not in _MODEL_TYPES:
            raise LayoutError(
                f"The model type {text.get('model_type')!r} cannot be recorded: "
                f"use one of {', '.join(_MODEL_TYPES)}."
            )
        try:
            num_layers = text["num_hidden_layers"]
            return cls(
                num_layers=num_layers,
                hidden_size=text["hidden_size"],
                moe_intermediate_size=text["moe_intermediate_size"],
                num_experts=text["num_experts"],
                top_k=text["num_experts_per_tok"],
                num_kv_heads=text["num_key_value_heads"],
                head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
                moe_layers=tuple(i for i in range(num_layers) if _is_moe(text, i)),
                attention_layers=tuple(i for i in range(num_layers) if _has_kv_cache(text, i)),
            )
        except KeyError as missing:
            raise LayoutError(
                f"The model config has no entry {missing}: pass the complete config.json."
            ) from None


def _is_moe(text: Mapping[str, Any], layer: int) -> bool:
    dense = layer in (text.get("mlp_only_layers") or ())
    return not dense and (layer + 1) % (text.get("decoder_sparse_step") or 1) == 0


def _has_kv_cache(text: Mapping[str, Any], layer: int) -> bool:
    if text["model_type"] == "qwen3_moe":
        return True
    if text.get("layer_types"):
        return bool(text["layer_types"][layer] == "full_attention")
    return (layer + 1) % (text.get("full_attention_interval") or 4) == 0


def deeper_half(num_layers: int) -> tuple[int, ...]:
    """Return the later half of the layers; of an odd number the middle one too."""
    return tuple(range(num_layers // 2, num_layers))


def parse_layers(spec: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers that "deeper-half", "all" or a list such as "0,3,5-7" names, ascending.

    Raises:
        LayoutError: if the text is not of that form or names a layer that the model lacks.
    """
    if spec == "deeper-half":
        return deeper_half(num_layers)
    if spec == "all":
        return tuple(range(num_layers))
    chosen: set[int] = set()
    for item in spec.split(","):
        first, dash, last = item.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise LayoutError(
                f"{item!r} in {spec!r} names no layers: "
                f'write "deeper-half", "all" or a list such as "0,3,5-7".'
            )
        low, high = int(first), int(last or first)
        if not low <= high < num_layers:
            raise LayoutError(
                f"{item!r} in {spec!r} is out of range: "
                f"the model has the layers 0 to {num_layers - 1}."
            )
        chosen.update(range(low, high + 1))
    return tuple(sorted(chosen))


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise LayoutError unless low <= value <= high."""
    if not low <= value <= high:
        raise LayoutError(f"{name} is {value}: it must lie between {low} and {high}.")


def check_layers(name: str, layers: tuple[int, ...], num_layers: int) -> None:
    """Raise LayoutError unless `layers` ascend and all lie in a model of `num_layers`."""
    ascending = all(a < b for a, b in pairwise(layers))
    if not ascending or (layers and not 0 <= layers[0] <= layers[-1] < num_layers):
        raise LayoutError(
            f"{name} is {layers}: give ascending layers between 0 and {num_layers - 1}."
        )
