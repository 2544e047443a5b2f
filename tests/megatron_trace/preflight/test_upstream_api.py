"""What our code uses of Megatron-core is listed, and a change of it is refused by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from reference_rollout import HF_CONFIG

import megatron_trace
from megatron_trace.preflight import upstream_api
from megatron_trace.preflight.hook_check import UnknownUpstream, require_live_hooks
from patches.check.attributes import Attributes

pytestmark = pytest.mark.usefixtures("one_rank")


def listed_paths() -> list[str]:
    """Every `module:name` of Megatron-core in the list."""
    texts = [getattr(use, field.name) for use in upstream_api.USES for field in fields(use)]
    return [text for text in texts if isinstance(text, str) and text.startswith("megatron.")]


def listed_options() -> set[str]:
    return {
        name
        for use in upstream_api.USES
        if isinstance(use, Attributes) and use.owner.endswith(":TransformerConfig")
        for name in use.names
    }


def imports_of_our_code() -> Iterator[tuple[str, str]]:
    for file in Path(*megatron_trace.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                yield from ((str(node.module), each.name) for each in node.names)


def test_the_installed_megatron_is_as_our_code_needs_it() -> None:
    require_live_hooks()


def test_everything_that_our_code_imports_of_megatron_is_listed() -> None:
    imported = set(imports_of_our_code())
    assert ("megatron.core.transformer.moe.moe_layer", "MoELayer") in imported
    paths = listed_paths()
    for module, name in imported:
        beginnings = (f"{module}:{name}", f"{module}.{name}:")
        assert any(path.startswith(beginnings) for path in paths), f"{module}.{name}"


class Options:
    """Notes the name of every option that is read."""

    def __init__(self, read: set[str]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return Options(set())

    def __bool__(self) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return False


def test_every_option_that_is_refused_is_listed() -> None:
    """An option that is gone counts as off, so only the list says that it has another name."""
    from megatron_trace.preflight.unsupported import UNSUPPORTED

    read: set[str] = set()
    for refusal in UNSUPPORTED:
        refusal.applies(Options(read))
    assert {"fp4", "gtp_weight_remat_size", "expert_gtp_weight_remat_size"} <= read
    assert read <= listed_options()


def test_every_option_of_a_loaded_model_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_trace.hf import qwen3_moe

    monkeypatch.setattr(qwen3_moe, "TransformerConfig", dict)
    assert set(qwen3_moe.transformer_config(HF_CONFIG)) <= listed_options()


def test_a_function_with_another_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import tensor_parallel

    monkeypatch.setattr(tensor_parallel, "all_to_all", lambda group, rows: rows)
    with pytest.raises(UnknownUpstream, match=r"tensor_parallel:all_to_all takes \(group, rows\)"):
        require_live_hooks()


def test_a_router_that_passes_something_else_to_the_replay_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_trace.layers.router_replay import RecordedRoutes

    monkeypatch.setattr(RecordedRoutes, "get_replay_topk", lambda self, scores, topk: scores)
    with pytest.raises(
        UnknownUpstream,
        match=r"topk_routing_with_score_function calls router_replay\.get_replay_topk\(scores",
    ):
        require_live_hooks()


def test_a_dispatcher_without_an_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "__init__", lambda self: None)
    with pytest.raises(
        UnknownUpstream, match=r"we use .*sort_input_by_local_experts of .*AlltoAllTokenDispatcher"
    ):
        require_live_hooks()


def test_an_attention_that_is_called_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def forward(self, query, key, value, attention_mask, sink):  # type: ignore[no-untyped-def]
        return query

    monkeypatch.setattr(DotProductAttention, "forward", forward)
    with pytest.raises(
        UnknownUpstream, match=r"DotProductAttention\.forward takes .* with sink"
    ) as error:
        require_live_hooks()
    assert "missing a required argument: 'sink'" in str(error.value)
