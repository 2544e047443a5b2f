"""What our code uses of SGLang is listed, and a change of it is refused by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import sglang_trace
from patches.check.attributes import Attributes
from sglang_trace import hooks
from sglang_trace.preflight import hook_check, upstream_api
from sglang_trace.preflight.unsupported import UNSUPPORTED
from sglang_trace.weights.updates import CHANGES_WEIGHTS

hooks.on_import()


def listed_paths() -> list[str]:
    """Every `module:name` of SGLang in the list."""
    texts = [getattr(use, field.name) for use in upstream_api.USES for field in fields(use)]
    return [text for text in texts if isinstance(text, str) and text.startswith("sglang.")]


def listed_names(owner: str) -> set[str]:
    return {
        name
        for use in upstream_api.USES
        if isinstance(use, Attributes) and use.owner.endswith(owner)
        for name in use.names
    }


def imports_of_our_code() -> Iterator[tuple[str, str]]:
    for file in Path(*sglang_trace.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                yield from ((str(node.module), each.name) for each in node.names)


def test_the_installed_sglang_is_as_our_code_needs_it() -> None:
    hook_check.check_options()
    hook_check.check_scheduler()


def test_everything_that_our_code_imports_of_sglang_is_listed() -> None:
    imported = set(imports_of_our_code())
    assert ("sglang.srt.layers.quantization.base_config", "FusedMoEMethodBase") in imported
    paths = listed_paths()
    listed_in = listed_names(":")
    for module, name in imported:
        beginnings = (f"{module}:{name}", f"{module}.{name}:")
        assert name in listed_in or any(path.startswith(beginnings) for path in paths), (
            f"{module}.{name}"
        )


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
    read: set[str] = set()
    for row in UNSUPPORTED:
        row.applies(Options(read))
    assert {"enable_lmcache", "lora_paths", "cuda_graph_config"} <= read
    assert read <= listed_names("ServerArgs")


def test_every_update_request_is_listed() -> None:
    assert listed_names("io_struct:") == CHANGES_WEIGHTS


def test_a_method_with_another_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

    monkeypatch.setattr(FusedMoEMethodBase, "apply", lambda self, layer, dispatched: dispatched)
    with pytest.raises(
        hook_check.UnknownUpstream,
        match=r"FusedMoEMethodBase\.apply takes \(layer, dispatched\).* \(layer.*dispatch_output",
    ):
        hook_check.check_scheduler()


def test_a_request_without_an_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_batch import Req

    def changed(self: Any, request_id: str) -> None:
        self.request_id = request_id

    monkeypatch.setattr(Req, "__init__", changed)
    with pytest.raises(
        hook_check.UnknownUpstream,
        match=r"we use rid, .* of .*schedule_batch:Req, which has no such",
    ):
        hook_check.check_scheduler()


def test_an_option_under_another_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import server_args

    kept = dict.fromkeys(listed_names("ServerArgs") - {"enable_lmcache"})
    methods = {
        name: getattr(server_args.ServerArgs, name)
        for name in ("add_cli_args", "resolve_once")
        if hasattr(server_args.ServerArgs, name)
    }
    renamed = type("ServerArgs", (), {**kept, **methods, "enable_lm_cache": False})
    monkeypatch.setattr(server_args, "ServerArgs", renamed)
    with pytest.raises(
        hook_check.UnknownUpstream, match=r"we use enable_lmcache of .* but enable_lm_cache"
    ) as error:
        hook_check.check_options()
    assert ";" not in str(error.value), "nothing else is different"


def test_a_function_with_another_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import server_args

    monkeypatch.setattr(server_args, "prepare_server_args", lambda argv, environment: argv)
    with pytest.raises(
        hook_check.UnknownUpstream,
        match=r"we call prepare_server_args\(arguments\) .*missing a required argument",
    ):
        hook_check.check_options()
