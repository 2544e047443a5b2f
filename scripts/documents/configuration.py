"""docs/configuration.md: every flag and option, from the parsers and dataclasses themselves."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from bridge.cli.app import app as bridge_app
from megatron_trace.config import TraceTrainerConfig
from megatron_trace.records.guidance import Guidance
from patches.cli import app as patches_app
from sglang_trace.config import add_arguments

HEAD = """# Configuration

Every flag and option. Made by `python -m scripts.documents` from the code.
"""
ENVIRONMENT = """## Environment variables

| variable | read by | means |
|---|---|---|
| `TMPDIR` | bridge | where scratch files lie if `--spill` is not given |
| `XDG_CACHE_HOME` | rollout on a GPU | where the compiled decode kernel is kept |
| `SGLANG_USE_CPU_ENGINE` | rollout without a GPU | SGLang's own switch; the launcher sets it to 1 |
| `SGLANG_CPU_OMP_THREADS_BIND` | rollout without a GPU | SGLang's own: cores of CPU ranks |
| `CUDA_HOME`, `CUDA_PATH` | rollout on a GPU | where `nvcc` is looked for |
"""


def configuration() -> str:
    """Return the whole document."""
    sections = [HEAD, *_rollout(), *_trainer(), ENVIRONMENT]
    sections += _commands("python -m bridge", get_command(bridge_app))
    sections += _commands("python -m patches", get_command(patches_app))
    return "\n".join(sections)


def _rollout() -> Iterator[str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    yield "## `python -m sglang_trace.launch_server`\n"
    yield "Takes every flag of `sglang.launch_server`, and these:\n"
    yield "| flag | default | means |\n|---|---|---|"
    for action in parser._actions:
        if action.dest != "help":
            default = _shown(action.default)
            help_text = (action.help or "") % {"default": action.default, "prog": ""}
            yield f"| `{action.option_strings[0]}` | {default} | {_cell(help_text)} |"
    yield ""


def _trainer() -> Iterator[str]:
    yield "## `python -m megatron_trace.launch`\n"
    yield "Takes every flag of `torchrun` but `--no-python` and `--run-path`. In the script:\n"
    for kind in (TraceTrainerConfig, Guidance):
        yield f"### `{kind.__name__}`\n"
        yield "| field | default | means |\n|---|---|---|"
        described = _fields(kind)
        for name, field in kind.__dataclass_fields__.items():
            yield f"| `{name}` | {_shown(field.default)} | {_cell(described[name])} |"
        yield ""


def _fields(kind: type) -> dict[str, str]:
    """Return what a dataclass's docstring says of each field."""
    text = inspect.getdoc(kind) or ""
    names = "|".join(kind.__dataclass_fields__)
    pieces = re.split(rf"\n({names})\s{{2,}}", "\n" + text.split("\n\n", 1)[1])
    return {
        name: " ".join(body.split()) for name, body in zip(pieces[1::2], pieces[2::2], strict=True)
    }


def _commands(name: str, command: Any) -> Iterator[str]:
    # Typer brings a click of its own, so its commands are told by what they offer.
    yield f"## `{name}`\n"
    for each in command.commands.values():
        yield f"### `{name} {each.name}`\n"
        yield f"{_cell((each.help or '').split(chr(10) * 2)[0])}\n"
        shown = [parameter for parameter in each.params if parameter.name != "help"]
        if shown:
            yield "| argument or flag | default | means |\n|---|---|---|"
        for parameter in shown:
            is_flag = parameter.param_type_name == "option"
            spelled = parameter.opts[0] if is_flag else (parameter.name or "").upper()
            about = _cell(getattr(parameter, "help", None) or "")
            yield f"| `{spelled}` | {_shown(parameter.default)} | {about} |"
        yield ""


def _shown(default: Any) -> str:
    if default is None or default is False or default == argparse.SUPPRESS:
        return ""
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f"`{default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
