"""Links lead somewhere, commands have the flags they are shown with, quotes are real."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bridge.cli.app import app as bridge_app
from patches.cli import app as patches_app
from scripts.documents.__main__ import generated

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"])
PACKAGES = ("bridge", "sglang_trace", "megatron_trace", "patches")
MAX_ARCHITECTURE_LINES = 90
# Files of others that documents name.
OTHERS = {"conflict.md"}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return text.replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, place = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        assert file.exists(), f"{target} does not exist"
        if place:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            assert place in map(anchor, headings), f"{target} has no such heading"


@pytest.mark.parametrize("document", list(generated()), ids=ids)
def test_generated_documents_are_current(document: Path) -> None:
    assert document.read_text() == generated()[document], "run python -m scripts.documents"


def test_the_architecture_is_short() -> None:
    lines = (ROOT / "docs/architecture.md").read_text().splitlines()
    assert len(lines) <= MAX_ARCHITECTURE_LINES


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for document in ROOT.glob("docs/*.md"):
        assert document.name == "README.md" or f"({document.name})" in index


@cache
def source_texts() -> str:
    """All string literals of the packages, implicit concatenations joined."""
    found = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_are_those_of_the_code() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quotes = re.findall(r"^\| `([^`]+)`", text, re.M)
    assert len(quotes) >= 12
    missing = [quote for quote in quotes if quote not in source_texts()]
    assert missing == []


# --- commands


def shell_lines(document: Path) -> Iterator[str]:
    """Every command of the document's shell blocks, continued lines joined."""
    for block in re.findall(r"```(?:bash|sh)?\n(.*?)```", document.read_text(), re.S):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield line.split("  #")[0].strip().rstrip("&").strip()


def our_commands() -> list[Any]:
    return [
        pytest.param(document, line, id=f"{ids(document)}: {line[:60]}")
        for document in DOCUMENTS
        for line in shell_lines(document)
        if re.match(r"(python -m (bridge|patches|sglang_trace|scripts|benchmarks|examples))", line)
    ]


@pytest.mark.parametrize(("document", "line"), our_commands())
def test_commands_exist_and_have_the_flags_they_are_shown_with(document: Path, line: str) -> None:
    words = shlex.split(re.sub(r"[\[\]()…]", " ", line), comments=True)
    module, arguments = words[2], words[3:]
    flags = {word.split("=")[0] for word in arguments if word.startswith("--")}
    if module in ("bridge", "patches"):
        group = get_command(bridge_app if module == "bridge" else patches_app)
        known = {opt for p in group.params for opt in p.opts}
        if arguments and not arguments[0].startswith("-"):
            command = group.commands[arguments[0]]
            known |= {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
        assert flags <= known | {"--help"}
    elif module == "sglang_trace.launch_server":
        ours = {flag for flag in flags if flag.startswith("--trace")}
        assert ours <= set(re.findall(r"--trace-[a-z-]+", source_texts()))
    else:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_python_blocks_compile_and_name_what_exists() -> None:
    for document in DOCUMENTS:
        for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.S):
            for node in ast.walk(ast.parse(block)):
                if (
                    isinstance(node, ast.ImportFrom)
                    and (node.module or "").split(".")[0] in PACKAGES
                ):
                    module = importlib.import_module(str(node.module))
                    for name in node.names:
                        assert hasattr(module, name.name), f"{node.module}.{name.name}"


HARMLESS = (
    r"python -m (patches (status|verify|doctor)|bridge (keys|cost)|scripts\.documents --check)\b"
)


@pytest.mark.parametrize(
    ("document", "line"), [p for p in our_commands() if re.match(HARMLESS, p.values[1])]
)
def test_commands_that_start_and_change_nothing_here_run_as_printed(
    document: Path, line: str, tmp_path: Path
) -> None:
    """The first job of the README runs whole in `test_readme.py`."""
    run = subprocess.run(
        [sys.executable, *shlex.split(line, comments=True)[1:]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def names_of_files() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def test_files_that_documents_name_exist() -> None:
    """By their whole path, or by a part of it that begins at a folder or at the name."""
    files = names_of_files()
    missing = []
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
        for name in re.findall(r"`([\w/.-]+\.(?:py|cu|c|md|yaml|html|sh|toml))`", text):
            if not any(file == name or file.endswith(f"/{name}") for file in files | OTHERS):
                missing.append(f"{ids(document)}: {name}")
    assert missing == []
