"""Options of SGLang's server that a part of this package does not support.

An option is described once here; the tables of capture (`preflight.unsupported`) and of the
attention backend (`attention.unsupported`) each have a reason of their own for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option with the settings in question; `applies` reads SGLang's resolved options."""

    flag: str
    applies: Callable[[Any], bool]


@dataclass(frozen=True)
class Unsupported:
    """An option that is not supported, the reason, and what the user can do instead."""

    option: Option
    reason: str
    remedy: str = "leave it out"

    @property
    def flag(self) -> str:
        """The option as an error message names it."""
        return self.option.flag

    def applies(self, options: Any) -> bool:
        """Whether SGLang's resolved options have the setting."""
        return self.option.applies(options)


def is_on(name: str) -> Callable[[Any], bool]:
    """Return whether an option is on; one that a release does not have cannot be."""
    return lambda options: bool(getattr(options, name, False))


def above_one(name: str) -> Callable[[Any], bool]:
    """Return whether a count is above one."""
    return lambda options: (getattr(options, name) or 1) > 1


def switch(name: str) -> Option:
    """Return the option of this name, in any setting but off."""
    return Option(_flag(name), is_on(name))


def count_above_one(name: str) -> Option:
    """Return the option of this name, a count, where it is above one."""
    return Option(f"{_flag(name)} above 1", above_one(name))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def backends_of(options: Any) -> tuple[str | None, str | None]:
    """Return the attention backends of prefill and decode."""
    both = options.attention_backend
    return options.prefill_attention_backend or both, options.decode_attention_backend or both


def listed(found: Iterable[Unsupported]) -> str:
    """Return one error message for all of them."""
    return "; ".join(f"{row.flag}: {row.reason}, so {row.remedy}" for row in found)


# Several GPUs or processes of one engine, apart from tensor and expert parallelism.
PARALLEL = tuple(map(count_above_one, ("dp_size", "pp_size", "attn_cp_size", "dcp_size")))
# KV caches that copy KV slots to other places.
COPYING_CACHES = tuple(
    map(
        switch,
        (
            "enable_hierarchical_cache",
            "enable_lmcache",
            "enable_flexkv",
            "enable_hisparse",
            "enable_unified_memory",
            "enable_kv_cache_sharding",
        ),
    )
)
SPECULATION = switch("speculative_algorithm")
DISAGGREGATION = Option(
    "--disaggregation-mode", lambda options: options.disaggregation_mode != "null"
)
TWO_BATCH_OVERLAP = switch("enable_two_batch_overlap")
PDMUX = switch("enable_pdmux")
DIFFUSION = switch("dllm_algorithm")
PREFILL_GRAPH = Option(
    "a prefill CUDA graph",
    lambda options: options.cuda_graph_config.prefill.backend != "disabled",
)
NO_PREFILL_GRAPH = "add --cuda-graph-backend-prefill disabled"
